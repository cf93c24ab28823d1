"""Verifying drafted trees so that the output keeps the target's own distribution.

At every node the target's token is drawn as plain decoding would draw it, and the walk from the root goes on to the
child that is this token. The children are the drafter's choices, never drawn at random, so what is emitted is drawn
from the target's distribution alone: greedy and seeded requests get plain decoding's tokens, others its distribution
(SpecInfer, 2305.09781, calls it naive sampling; for such children it equals rejecting one after the other).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import Ints
from dynaspec.sampling import ops
from dynaspec.sampling.draw import draw
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose
from dynaspec.sampling.state import SamplerState

from .chain import Accepted

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """The drafted trees of B requests, as rows of one target pass: a root, the last committed token, then its nodes."""

    roots: Ints
    """[B] row of each root; those of its nodes follow."""
    tokens: Ints
    """[B, N]"""
    parents: Ints
    """[B, N] see ``Drafts.parents``."""
    lens: Ints
    """[B] nodes to verify."""


@dataclass(frozen=True, slots=True)
class Walked:
    """The walk of each request, from the root as far as the target's tokens are drafted."""

    accepted: Accepted
    path: Ints
    """[B, depth] accepted nodes; −1 behind the last."""
    verdict: Ints
    """[B, N] see ``StepResult.verdict``."""
    whole: Bools
    """[B] the walk ended where nothing more was drafted."""


def accept_tree(scores: torch.Tensor, rows: Rows, trees: DraftTrees, depth: int, state: SamplerState) -> Walked:
    """Accepts a path of every tree and draws the token that follows it.

    Args:
        scores: [R, V] the target's, from ``SamplerState.process``
        rows: for each request its root and its nodes, each with the path that leads to it as its drafted tokens
        trees: which rows those are
        depth: of the deepest node
        state: the requests' parameters, not yet told of this step's tokens
    """
    if bool(state.greedy[rows.lanes].all()) and state.leaves_alone(rows.lanes):
        drawn, nothing = ops.argmax(scores), np.zeros(rows.lanes.size, np.bool_)
    else:
        drawn, nothing = draw(scores, rows, state, Purpose.TARGET)[0], state.without_token(scores, rows)
    own = np.ascontiguousarray(ops.to_host(drawn))
    accepted, tokens, path, verdict, stop, refused = walk(
        own, nothing, trees.roots, trees.tokens, trees.parents, trees.lens, depth
    )
    failed = np.flatnonzero(refused >= 0)
    by_grammar = np.zeros(stop.size, np.bool_)
    by_grammar[failed] = state.grammars.refused(rows, stop[failed], trees.tokens[failed, refused[failed]])
    return Walked(Accepted(accepted, tokens, nothing[stop], by_grammar), path, verdict, refused < 0)


@kernel
def walk(
    own: Ints, nothing: Bools, roots: Ints, tokens: Ints, parents: Ints, lens: Ints, depth: int
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    """Follows the target's ``own`` [R] tokens through trees.

    Args:
        nothing: [R] rows that have no token.
        roots, tokens, parents, lens, depth: see ``DraftTrees`` and ``accept_tree``.

    Returns:
        ``Accepted.accepted`` and ``tokens``, ``Walked.path`` and ``verdict``; [B] the rows where the walks end, and the
        first choices behind them, −1 where there is none.
    """
    batch = lens.size
    accepted, emitted = np.zeros(batch, np.int64), np.zeros((batch, depth + 1), np.int64)
    path, verdict = np.full((batch, depth), -1, np.int64), np.zeros(tokens.shape, np.int64)
    stop, refused = np.empty(batch, np.int64), np.empty(batch, np.int64)
    for b in range(batch):
        at, n, chosen, row, first = -1, 0, 0, 0, -1
        while chosen >= 0:
            row, first, chosen = int(roots[b]) + 1 + at, -1, -1
            for node in range(at + 1, lens[b]):
                if parents[b, node] == at:
                    verdict[b, node] = -1
                    if first < 0:
                        first = node
                    if chosen < 0 and tokens[b, node] == own[row] and not nothing[row]:
                        chosen, verdict[b, node] = node, 1
            if chosen >= 0:
                path[b, n], emitted[b, n], at = chosen, tokens[b, chosen], chosen
                n += 1
        accepted[b], emitted[b, n], stop[b], refused[b] = n, own[row], row, first
    return accepted, emitted, path, verdict, stop, refused
