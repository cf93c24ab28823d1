"""How a draft tree grows, whoever runs the passes: which nodes it gets, from which of them a pass goes on, and which of
them become the draft (dynamic trees as in EAGLE-2, 2406.16858, with a price in the place of a fixed size).

A node that a pass goes on from is a *parent*. All compiled, so that a whole draft can be one call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import kernel, subroutine
from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints
from dynaspec.contract.step import LOGIT_RANGE, SpecPlan, StopRule, TreeRule
from dynaspec.kv.rows import fill_rows
from dynaspec.sampling.cpu import top

from .ngram import REPEAT_MATCH, REPEAT_WEIGHT, ahead, repeat_bonus
from .stopping import entry

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

NOTHING: Ints = np.empty(0, np.int64)
_NO_RULE = StopRule(below=(0.0,))


class Growth(NamedTuple):
    """The trees of A requests that draft, of up to M nodes in order of creation."""

    texts: npt.NDArray[np.int32]
    """[lanes, max length]"""
    lanes: Ints
    lengths: Ints
    """[A]"""
    depth: Ints
    """[A] most tokens in a row."""
    nodes: Ints
    """[A] most nodes of the draft, and most parents."""
    tokens: Ints
    """[A, M], as the next six."""
    above: Ints
    """Each node's parent; −1 = the root."""
    own_depth: Ints
    survival: Float64
    """See ``TreeRule``."""
    confidence: Float32
    signal: Float32
    row: Ints
    """Place among the parents of its request; −1 = it is none."""
    made: Ints
    """[A] nodes so far."""
    parents: Ints
    """[A, most nodes] nodes that are parents."""
    parent_count: Ints
    """[A]"""
    width: int
    below: Float64
    """By place in the draft, see ``TreeRule``."""
    later: float
    """See ``TreeRule``."""
    shape: Ints
    """[2, S] parents and ranks of a tree of fixed shape; S = 0: there is none."""
    survives: bool
    """Survivals are estimated by ``weight``, ``bias`` and ``offset`` [A], see ``StopRule``."""
    weight: float
    bias: Float64
    offset: Float64
    expand_below: Float64
    """By pass, the survival below which no pass goes on from a node."""
    total_below: Float64
    """By pass, see ``StopRule``."""


def grow(batch: DecodeBatch, index: Ints, depth: Ints, nodes: Ints, rule: TreeRule, stop: StopRule | None) -> Growth:
    """Trees without nodes.

    Args:
        index: [A] places in the batch of the requests that draft.
        depth, nodes: [A] granted, ≥ 1.
        rule: how they branch.
        stop: when passes end; of these requests alone, each by itself.
    """
    stop = stop or _NO_RULE
    most, size = int(nodes.max(initial=1)), index.size
    room = rule.width * (most + 1)
    shape = rule.shape
    return Growth(
        texts=batch.tokens,
        lanes=batch.lanes[index],
        lengths=batch.lengths[index],
        depth=depth,
        nodes=nodes,
        tokens=np.zeros((size, room), np.int64),
        above=np.full((size, room), -1, np.int64),
        own_depth=np.zeros((size, room), np.int64),
        survival=np.zeros((size, room)),
        confidence=np.zeros((size, room), np.float32),
        signal=np.zeros((size, room), np.float32),
        row=np.full((size, room), -1, np.int64),
        made=np.zeros(size, np.int64),
        parents=np.zeros((size, most), np.int64),
        parent_count=np.zeros(size, np.int64),
        width=rule.width,
        below=np.array(rule.below, np.float64),
        later=rule.later,
        shape=np.zeros((2, 0), np.int64) if shape is None else np.array([shape.parents, shape.ranks], np.int64),
        survives=stop.signal == "survival",
        weight=stop.weight,
        bias=np.array(stop.bias or (0.0,)),
        offset=np.array(stop.offset) if stop.offset else np.zeros(size),
        expand_below=np.array(stop.below or (0.0,), np.float64),
        total_below=np.array(stop.total_below or (-np.inf,)),
    )


@subroutine
def largest(lengths: Ints) -> int:
    """The largest of lengths; 0 if there are none."""
    most = 0
    for length in lengths:
        most = max(most, length)
    return most


@kernel
def add_nodes(growth: Growth, who: Ints, above: Ints, tokens: Ints, probability: Float32) -> None:
    """Children of nodes that a pass was run over.

    Args:
        who: [r] requests, places among the A.
        above: [r] the nodes; −1 = the root.
        tokens: [r, C] the drafter's likeliest choices behind each, in order.
        probability: [r, C] of these; 0 = it never comes.
    """
    g, path = growth, np.zeros(largest(growth.depth) + 1, np.int64)
    for n in range(who.size):
        a, parent = who[n], above[n]
        before, position = 1.0, 0
        if parent >= 0:
            before, position, at = g.survival[a, parent], g.own_depth[a, parent], parent
            while at >= 0:
                path[g.own_depth[a, at] - 1] = g.tokens[a, at]
                at = g.above[a, at]
        for rank in range(tokens.shape[1]):
            if g.shape.shape[1]:
                wanted = False
                for node in range(min(g.shape.shape[1], g.nodes[a])):
                    wanted |= g.shape[0, node] == parent and g.shape[1, node] == rank
                if not wanted:
                    continue
            elif rank and not probability[n, rank] > 0.0:
                break
            p, signal = float(probability[n, rank]), 0.0
            survival = before * p
            if g.survives and rank:
                survival = before * min(g.later * p, 0.5)
            elif g.survives:
                second = float(probability[n, 1]) if tokens.shape[1] > 1 else 0.0
                path[position] = tokens[n, rank]
                bonus = repeat_bonus(g.texts[g.lanes[a]], g.lengths[a], path, position, REPEAT_MATCH)
                lead = np.log(p / second) if second > 0.0 else LOGIT_RANGE
                signal = ahead(lead, p) + REPEAT_WEIGHT * bonus
                score = g.weight * signal + entry(g.bias, position + 1) + g.offset[a]
                survival = before / (1.0 + np.exp(-score))
            if rank and not g.shape.shape[1] and survival < g.below[0]:
                continue
            node = g.made[a]
            g.tokens[a, node], g.above[a, node], g.own_depth[a, node] = tokens[n, rank], parent, position + 1
            g.survival[a, node], g.confidence[a, node], g.signal[a, node] = survival, np.float32(p), np.float32(signal)
            g.made[a] += 1


@kernel
def add_best(growth: Growth, who: Ints, above: Ints, logits: Float32, known: Ints) -> None:
    """``add_nodes`` with the likeliest tokens by logits [r, V].

    Args:
        known: [V] the target's ids of the tokens that logits are about; empty = all, in their order.
    """
    width = min(growth.width, logits.shape[1])
    tokens, probability = np.empty((who.size, width), np.int64), np.empty((who.size, width), np.float32)
    top(logits, tokens, probability)
    if known.size:
        for n in range(who.size):
            for i in range(width):
                tokens[n, i] = known[tokens[n, i]]
    add_nodes(growth, who, above, tokens, probability)


@kernel
def next_parents(growth: Growth, done: int) -> tuple[Ints, Ints]:
    """The nodes of depth ``done`` that a pass goes on from, by request: places among the A [r], and nodes [r]."""
    g, size = growth, growth.made.size
    who, chosen, n = np.empty(g.tokens.size, np.int64), np.empty(g.tokens.size, np.int64), 0
    shape, least, gain = g.shape.shape[1], entry(g.expand_below, done), 0.0
    for a in range(size):
        if done >= g.depth[a]:
            continue
        taken = 0
        if shape:
            for node in range(g.made[a]):
                if g.own_depth[a, node] == done and (g.shape[0, : g.nodes[a]] == node).any():
                    who[n], chosen[n], n, taken = a, node, n + 1, taken + 1
        # Every later depth is left one, or branches would use up what a sure draft needs to go on.
        most = g.nodes[a] - 1 - max(0, min(g.depth[a], g.nodes[a]) - 1 - done)
        while not shape and taken < g.width and g.parent_count[a] + taken < most:
            best = -1
            for node in range(g.made[a]):
                new = g.own_depth[a, node] == done and g.row[a, node] < 0 and g.survival[a, node] >= least
                if new and (best < 0 or g.survival[a, node] > g.survival[a, best]):
                    best = node
            if best < 0:
                break
            g.row[a, best] = 0  # taken
            gain += g.survival[a, best] - least
            who[n], chosen[n], n, taken = a, best, n + 1, taken + 1
    if not shape and gain < entry(g.total_below, done):
        n = 0
    for i in range(n):
        a, row = who[i], g.parent_count[who[i]]
        g.row[a, chosen[i]], g.parents[a, row] = row, chosen[i]
        g.parent_count[a] += 1
    return who[:n], chosen[:n]


@kernel
def finish(growth: Growth) -> tuple[Ints, Ints, Ints, Float32, Float32]:
    """The drafts: as many nodes as are granted, those of largest survival, in this order.

    Returns:
        Lengths [A]; tokens, parents, confidences and signals [A, most nodes].
    """
    g, size, most = growth, growth.made.size, growth.parents.shape[1]
    lens, tokens, parents = np.zeros(size, np.int64), np.zeros((size, most), np.int64), np.full((size, most), -1)
    confidence, signal = np.zeros((size, most), np.float32), np.zeros((size, most), np.float32)
    for a in range(size):
        count = g.made[a]
        order = np.arange(count) if g.shape.shape[1] else np.argsort(-g.survival[a, :count], kind="mergesort")
        place, n = np.full(count, -1), 0
        for node in order:
            above = g.above[a, node]
            pays = g.shape.shape[1] or n == 0 or g.survival[a, node] >= entry(g.below, n + 1)
            if n == g.nodes[a] or not pays or (above >= 0 and place[above] < 0):
                break
            place[node], tokens[a, n], parents[a, n] = n, g.tokens[a, node], -1 if above < 0 else place[above]
            confidence[a, n], signal[a, n] = g.confidence[a, node], g.signal[a, node]
            n += 1
        lens[a] = n
    return lens, tokens, parents, confidence, signal


def as_drafts(growth: Growth, index: Ints, plan: SpecPlan) -> Drafts:
    """The drafts of all requests of the plan, those at the places ``index`` [A] being the ones that have grown."""
    lens, own_tokens, own_parents, own_confidence, own_signal = finish(growth)
    requests, width = len(plan.depth), int(lens.max(initial=0))
    tokens, parents = np.zeros((requests, width), np.int64), np.full((requests, width), -1, np.int64)
    confidence, signal = np.zeros((requests, width), np.float32), np.zeros((requests, width), np.float32)
    tokens[index], parents[index] = own_tokens[:, :width], own_parents[:, :width]
    confidence[index], signal[index] = own_confidence[:, :width], own_signal[:, :width]
    all_lens, early = np.zeros(requests, np.int64), np.zeros(requests, np.bool_)
    all_lens[index] = lens
    early[index] = lens < growth.nodes
    return Drafts(tokens, all_lens, confidence, signal if growth.survives else None, parents=parents, early_exit=early)


@kernel
def parent_rows(
    growth: Growth, who: Ints, chosen: Ints, tables: npt.NDArray[np.int32], block_size: int
) -> tuple[Ints, tuple[npt.NDArray[np.int32], Ints, Ints, Ints, npt.NDArray[np.int32]], Ints, Ints, Ints, Ints, Ints]:
    """Rows of the pass that goes on from ``chosen`` [r] nodes of the requests ``who`` [r], ascending.

    The parents of earlier passes are rows of it again: what a row sees of its own pass can be said row by row, and of
    the KV before it cannot. So few more rows cost next to nothing.

    Args:
        tables: [lanes, max blocks] of all lanes.

    Returns:
        Requests of the pass, places among the A [s]; the fields of their ``RaggedRows``, without branches; each row's
        token, ancestors, request and node [R]; the rows of ``chosen`` [r].
    """
    g, requests, size = growth, np.empty(who.size, np.int64), 0
    for n in range(who.size):
        if n == 0 or who[n] != who[n - 1]:
            requests[size], size = who[n], size + 1
    requests = requests[:size]
    counts = g.parent_count[requests]
    fields = fill_rows(tables, block_size, g.lanes[requests], g.lengths[requests], counts)
    query_start, _, positions, _, _ = fields
    size, first = positions.size, np.zeros(g.made.size, np.int64)
    tokens, ancestors = np.empty(size, np.int64), np.empty(size, np.int64)
    owners, nodes, row = np.empty(size, np.int64), np.empty(size, np.int64), 0
    for s in range(requests.size):
        a = requests[s]
        first[a] = query_start[s]
        for i in range(counts[s]):
            node = g.parents[a, i]
            above = g.above[a, node]
            tokens[row], owners[row], nodes[row] = g.tokens[a, node], a, node
            positions[row] = g.lengths[a] + g.own_depth[a, node] - 1
            seen = np.int64(0) if above < 0 else ancestors[first[a] + g.row[a, above]]
            ancestors[row] = seen | (np.int64(1) << i)
            row += 1
    fresh = np.empty(who.size, np.int64)
    for n in range(who.size):
        fresh[n] = first[who[n]] + g.row[who[n], chosen[n]]
    return requests, fields, tokens, ancestors, owners, nodes, fresh


@kernel
def rows_above(growth: Growth, who: Ints, chosen: Ints, before: Ints, above: Ints) -> Ints:
    """[r] which rows of the pass before, over nodes ``above`` of requests ``before``, the nodes ``chosen`` [r] of the
    requests ``who`` [r] are children of."""
    rows = np.empty(who.size, np.int64)
    for n in range(who.size):
        row = 0
        while before[row] != who[n] or above[row] != growth.above[who[n], chosen[n]]:
            row += 1
        rows[n] = row
    return rows


@kernel
def tokens_of(growth: Growth, who: Ints, nodes: Ints) -> Ints:
    """[r] tokens of nodes; −1 = the root, the newest token."""
    tokens = np.empty(who.size, np.int64)
    for n in range(who.size):
        a = who[n]
        tokens[n] = (
            growth.tokens[a, nodes[n]] if nodes[n] >= 0 else growth.texts[growth.lanes[a], growth.lengths[a] - 1]
        )
    return tokens


@kernel
def paths(growth: Growth, who: Ints, above: Ints) -> tuple[Ints, Ints]:
    """[r] lengths and [r, longest] tokens of the paths that lead to the nodes ``above`` [r]; −1 = the root."""
    g = growth
    depth = np.zeros(who.size, np.int64)
    for n in range(who.size):
        depth[n] = 0 if above[n] < 0 else g.own_depth[who[n], above[n]]
    tokens = np.zeros((who.size, largest(depth)), np.int64)
    for n in range(who.size):
        at = above[n]
        while at >= 0:
            tokens[n, g.own_depth[who[n], at] - 1] = g.tokens[who[n], at]
            at = g.above[who[n], at]
    return depth, tokens
