"""What happens inside ``SuffixTree``, compiled.

A node stands for the string that leads to it; ``nodes`` has a row of ``COLUMNS`` for each, so that a visit costs one
line of the processor's cache. Row 0 is the root, hence 0 also says "none". Every suffix of every sequence, cut to the
greatest depth, is a path from the root that ends exactly at a node, and a node's count is the number of paths through
it. A node other than the root with one child only has a larger count than the child: otherwise they are one node.

::

    root ──"a b"──▶ 3 ──"c"──▶ 2 ──"d e"──▶ 1      the paths a b, a b c and a b c d e

Paths whose sequence still grows are *open*: the last ``max_depth`` suffixes of a sequence, whose ends are kept.
An open path's next token finds at its end

* no child: if nothing else uses the node it grows, otherwise it gets a leaf;
* a child that all other paths through the node go into: the boundary between the two moves down by one token;
* a child whose edge is one token: the path moves into it;
* a child with a longer edge: its first token is split off as a node above it. The child keeps its number, and
  with it the ends of other paths.

An edge's tokens are not copied: ``AT`` is where they stand in the newest sequence through the node, newest in order of
eviction. A path that enters a node takes its reference over if its sequence is newer; a split gives both parts the
old reference, then the upper one is entered; a boundary moves, and two nodes become one, only when all paths through
the upper node go on in the lower one, so the upper one's reference covers both. Since the oldest sequence leaves first,
a node that it leaves behind has another path, a newer one, hence a reference to that.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import copy_row, njit

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

PAGE = 64
"""Tokens in a page."""

COLUMNS = 12
COUNT, PARENT, CHILD, NEXT, PREVIOUS, CHILDREN = range(6)
"""Paths through the node; parent; any child; its brothers, in no order; how many children."""
BEST, SECOND = 6, 7
"""The child with the largest count, among equals the one entered last, 0 if that is to be found anew; and what the
count of no other child exceeds."""
STAMP = 8
"""When the node was last entered, or earlier if it was cut from below another since and has no brothers."""
FIRST, AT, LENGTH = 9, 10, 11
"""Edge: first token, place of the tokens in the pool, how many."""

LIVE, ROWS, FREE_NODE, ENTRIES, PAGES, PAGE_ROWS, FREE_PAGE, CLOCK, COUNTERS = range(9)
"""Nodes in use, rows ever used, first free one (0: none); entries of the table; pages in use, ever used, first
free one (−1: none); the time, which a token moves on by one."""

SIZE, FIRST_PAGE, LAST_PAGE, AGE, FIELDS = range(5)
"""Of a sequence: tokens, first and last page (−1: none), place in order of eviction."""


class Tree(NamedTuple):
    """The state."""

    nodes: Int32
    """[nodes, COLUMNS]"""
    table: Int64
    """[a power of 2] children of nodes with two or more: hash · 2³² + node; 0 is free. Open addressing."""
    tokens: Int32
    """[pages · PAGE]"""
    next_page: Int32
    """[pages] of the same sequence; −1: none."""
    page_age: Int64
    """[pages] AGE of its sequence."""
    sequences: Int64
    """[slots, FIELDS]"""
    ends: Int32
    """[slots, max_depth] where the open path from position p ends, at p mod max_depth."""
    counters: Int64
    """[COUNTERS]"""
    drafts: Int64
    """[2, max_depth] the best draft and the one in work."""
    probabilities: Float32
    """[2, max_depth] of their tokens."""


@njit(cache=True, nogil=True)
def append_tokens(tree: Tree, sequence: int, tokens: Int32, start: int, last_stamp: int) -> int:
    """Appends ``tokens[start:]`` to a sequence, as many as there is certainly room for.

    Args:
        last_stamp: the clock goes no further.

    Returns:
        how many.
    """
    nodes, counters, state = tree.nodes, tree.counters, tree.sequences[sequence]
    max_depth = tree.ends.shape[1]
    most_nodes = nodes.shape[0] - max_depth
    most_entries = fullest(tree.table.size) - 2 * max_depth
    for i in range(start, tokens.size):
        if counters[LIVE] > most_nodes or counters[ENTRIES] > most_entries or counters[CLOCK] >= last_stamp:
            return i - start
        position = state[SIZE]
        if position % PAGE == 0:
            if counters[PAGES] == tree.next_page.size:
                return i - start
            _add_page(tree, sequence)
        at = state[LAST_PAGE] * PAGE + position % PAGE
        tree.tokens[at] = tokens[i]
        counters[CLOCK] += 1
        _extend_paths(tree, tree.ends[sequence], position, tokens[i], at, state[AGE])
        state[SIZE] = position + 1
    return tokens.size - start


@njit(cache=True, nogil=True)
def remove_sequence(tree: Tree, sequence: int) -> None:
    """Removes the oldest sequence."""
    nodes, table, counters = tree.nodes, tree.table, tree.counters
    max_depth = tree.ends.shape[1]
    tokens = _text(tree, sequence)
    for start in range(tokens.size):
        end = min(start + max_depth, tokens.size)
        node, at = 0, start
        while at < end:
            child = _child(nodes, table, node, tokens[at])
            nodes[child, COUNT] -= 1
            if nodes[child, COUNT] == 0:  # nothing is below: it would be one node with this
                _unlink(nodes, table, counters, child)
                _free(nodes, counters, child)
                break
            if nodes[node, BEST] == child and nodes[child, COUNT] <= nodes[node, SECOND]:
                nodes[node, BEST] = 0
            at += nodes[child, LENGTH]
            node = child
        if node and nodes[node, CHILDREN] == 1 and nodes[nodes[node, CHILD], COUNT] == nodes[node, COUNT]:
            # If the reference is to a path that has gone, the paths left are this sequence's too and go next.
            _join(nodes, table, counters, node, nodes[node, CHILD])
    if tokens.size:
        tree.next_page[tree.sequences[sequence, LAST_PAGE]] = counters[FREE_PAGE]
        counters[FREE_PAGE] = tree.sequences[sequence, FIRST_PAGE]
        counters[PAGES] -= -(-tokens.size // PAGE)


@njit(cache=True, nogil=True)
def best_draft(
    tree: Tree, context: Int32, length: int, max_tokens: int, factor: float, offset: float, min_probability: float
) -> tuple[int, int, int, float]:
    """The draft with the largest score over all lengths of the match, among equals of the longest.

    Args:
        context: [≥ length] the text's end, ``max_depth`` tokens at most.

    Returns:
        (row of ``drafts`` that it is in, tokens, length of the match, score); 0 tokens if there is none.
    """
    max_depth = tree.ends.shape[1]
    row, best_n, best_match, best_score = 0, 0, 0, 0.0
    for match in range(_longest_followed(tree, context, length), 0, -1):
        limit = min(max_tokens, int(np.floor(match * factor + offset + 1e-6)), max_depth - match)
        if limit <= best_score:  # no token scores more than 1
            continue
        n, score = _draft(tree, context, length - match, length, limit, min_probability, 1 - row)
        if score > best_score:
            row, best_n, best_match, best_score = 1 - row, n, match, score
    return row, best_n, best_match, best_score


@njit(cache=True, nogil=True)
def best_tree(
    tree: Tree,
    context: Int32,
    length: int,
    max_nodes: int,
    depth: int,
    width: int,
    factor: float,
    offset: float,
    min_probability: float,
) -> tuple[Int64, Int64, Float32, int, float]:
    """``best_draft`` of trees: ``max_nodes`` nodes at most, no deeper than ``depth``, ``width`` children of a node.

    Returns:
        (tokens, parents, probabilities, each [nodes]; length of the match, score)
    """
    tokens, parents, probabilities = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)
    best_match, best_score = 0, 0.0
    for match in range(_longest_followed(tree, context, length), 0, -1):
        limit = min(max_nodes, int(np.floor(match * factor + offset + 1e-6)))
        if limit <= best_score:  # no node scores more than 1
            continue
        deepest = min(depth, tree.ends.shape[1] - match)
        found = _grow(tree, context, length - match, length, limit, deepest, width, min_probability)
        if found[3] > best_score:
            tokens, parents, probabilities, best_score = found
            best_match = match
    return tokens, parents, probabilities, best_match, best_score


@njit(cache=True, nogil=True)
def fullest(size: int) -> int:
    """The most entries in a table of that size."""
    return size // 4 * 3


@njit(cache=True, nogil=True)
def refill(table: Int64, entries: Int64) -> None:
    """Puts the entries of another table into an empty one."""
    mask = table.size - 1
    for entry in entries:
        if entry:
            i = (entry >> 32) & mask
            while table[i]:
                i = (i + 1) & mask
            table[i] = entry


@njit(cache=True, nogil=True)
def _add_page(tree: Tree, sequence: int) -> None:
    counters, state = tree.counters, tree.sequences[sequence]
    page = counters[FREE_PAGE]
    if page >= 0:
        counters[FREE_PAGE] = tree.next_page[page]
    else:
        page = counters[PAGE_ROWS]
        counters[PAGE_ROWS] += 1
    counters[PAGES] += 1
    tree.next_page[page] = -1
    tree.page_age[page] = state[AGE]
    if state[SIZE]:
        tree.next_page[state[LAST_PAGE]] = page
    else:
        state[FIRST_PAGE] = page
    state[LAST_PAGE] = page


@njit(cache=True, nogil=True)
def _text(tree: Tree, sequence: int) -> Int32:
    """[tokens] of a sequence, in one piece."""
    size = tree.sequences[sequence, SIZE]
    out = np.empty(size, np.int32)
    page = tree.sequences[sequence, FIRST_PAGE]
    for start in range(0, size, PAGE):
        n = min(PAGE, size - start)
        copy_row(tree.tokens[page * PAGE : page * PAGE + n], out[start:])
        page = tree.next_page[page]
    return out


@njit(cache=True, nogil=True)
def _following(next_page: Int32, at: int) -> int:
    """The place of a sequence's next token."""
    return at + 1 if (at + 1) % PAGE else int(next_page[at // PAGE]) * PAGE


@njit(cache=True, nogil=True)
def _extend_paths(tree: Tree, ends: Int32, position: int, token: int, at: int, age: int) -> None:
    """Takes the open paths of a sequence, and a new one, on to the token at its end."""
    nodes, table, counters = tree.nodes, tree.table, tree.counters
    max_depth = ends.size
    first = max(0, position - max_depth + 1)
    i = first % max_depth
    for start in range(first, position + 1):
        node = ends[i] if start < position else 0
        child = _child(nodes, table, node, token)
        if not child:
            if node and nodes[node, COUNT] == 1:
                nodes[node, LENGTH] += 1
            else:
                child = _new(nodes, counters)
                nodes[child, LENGTH], nodes[child, AT] = 1, at
                _link(nodes, table, counters, node, child, token)
                _enter(nodes, counters, node, child)
                node = child
        elif node and nodes[node, COUNT] == nodes[child, COUNT] + 1:
            nodes[node, LENGTH] += 1
            if nodes[child, LENGTH] > 1:
                _cut_first(tree, child)
            else:
                nodes[child, LENGTH] = 0
                _join(nodes, table, counters, node, child)
                node = child
        else:
            if nodes[child, LENGTH] > 1:
                child = _split(tree, child)
            if tree.page_age[nodes[child, AT] // PAGE] < age:
                nodes[child, AT] = at
            _enter(nodes, counters, node, child)
            node = child
        ends[i] = node
        i = i + 1 if i + 1 < max_depth else 0


@njit(cache=True, nogil=True)
def _enter(nodes: Int32, counters: Int64, node: int, child: int) -> None:
    """A path goes on from a node to a child of it."""
    nodes[child, COUNT] += 1
    nodes[child, STAMP] = counters[CLOCK]
    best, other = nodes[node, BEST], child
    if nodes[node, CHILDREN] == 1:
        nodes[node, BEST], nodes[node, SECOND] = child, 0
    elif best and best != child:
        if nodes[child, COUNT] >= nodes[best, COUNT]:
            nodes[node, BEST], other = child, best
        nodes[node, SECOND] = max(nodes[node, SECOND], nodes[other, COUNT])


@njit(cache=True, nogil=True)
def _split(tree: Tree, child: int) -> int:
    """Makes the first token of a node's edge a node of its own, above it, which is returned."""
    nodes = tree.nodes
    upper = _new(nodes, tree.counters)
    _take_place(nodes, tree.table, child, upper)
    nodes[upper, COUNT], nodes[upper, STAMP] = nodes[child, COUNT], nodes[child, STAMP]
    nodes[upper, AT], nodes[upper, LENGTH] = nodes[child, AT], 1
    nodes[upper, CHILD], nodes[upper, CHILDREN], nodes[upper, BEST] = child, 1, child
    nodes[child, PARENT], nodes[child, NEXT], nodes[child, PREVIOUS] = upper, 0, 0
    _cut_first(tree, child)
    return int(upper)


@njit(cache=True, nogil=True)
def _cut_first(tree: Tree, node: int) -> None:
    """Shortens a node's edge by its first token. The node has no brothers, so the table does not know it."""
    at = _following(tree.next_page, tree.nodes[node, AT])
    tree.nodes[node, AT], tree.nodes[node, FIRST] = at, tree.tokens[at]
    tree.nodes[node, LENGTH] -= 1


@njit(cache=True, nogil=True)
def _join(nodes: Int32, table: Int64, counters: Int64, node: int, child: int) -> None:
    """Makes a node and its only child one; the child's number stays, since paths end there."""
    nodes[child, COUNT], nodes[child, STAMP] = nodes[node, COUNT], nodes[node, STAMP]
    nodes[child, AT] = nodes[node, AT]
    nodes[child, LENGTH] += nodes[node, LENGTH]
    _take_place(nodes, table, node, child)
    _free(nodes, counters, node)


@njit(cache=True, nogil=True)
def _take_place(nodes: Int32, table: Int64, old: int, new: int) -> None:
    """Gives a node the place of another among its parent's children."""
    parent, before, after = nodes[old, PARENT], nodes[old, PREVIOUS], nodes[old, NEXT]
    nodes[new, PARENT], nodes[new, PREVIOUS], nodes[new, NEXT] = parent, before, after
    nodes[new, FIRST] = nodes[old, FIRST]
    if before:
        nodes[before, NEXT] = new
    else:
        nodes[parent, CHILD] = new
    if after:
        nodes[after, PREVIOUS] = new
    if nodes[parent, BEST] == old:
        nodes[parent, BEST] = new
    if nodes[parent, CHILDREN] > 1:
        i = _place(nodes, table, old)
        table[i] += new - old


@njit(cache=True, nogil=True)
def _link(nodes: Int32, table: Int64, counters: Int64, parent: int, child: int, token: int) -> None:
    """Adds a child to a node."""
    brother = nodes[parent, CHILD]
    nodes[child, PARENT], nodes[child, FIRST], nodes[child, PREVIOUS] = parent, token, 0
    nodes[child, NEXT] = brother
    nodes[parent, CHILD] = child
    nodes[parent, CHILDREN] += 1
    if brother:
        nodes[brother, PREVIOUS] = child
        if nodes[parent, CHILDREN] == 2:
            _put(nodes, table, counters, brother)
        _put(nodes, table, counters, child)


@njit(cache=True, nogil=True)
def _unlink(nodes: Int32, table: Int64, counters: Int64, child: int) -> None:
    """Takes a child from its parent."""
    parent, before, after = nodes[child, PARENT], nodes[child, PREVIOUS], nodes[child, NEXT]
    if before:
        nodes[before, NEXT] = after
    else:
        nodes[parent, CHILD] = after
    if after:
        nodes[after, PREVIOUS] = before
    if nodes[parent, BEST] == child:
        nodes[parent, BEST] = 0
    nodes[parent, CHILDREN] -= 1
    if nodes[parent, CHILDREN]:
        _drop(nodes, table, counters, child)
        if nodes[parent, CHILDREN] == 1:
            _drop(nodes, table, counters, nodes[parent, CHILD])


@njit(cache=True, nogil=True)
def _new(nodes: Int32, counters: Int64) -> int:
    """A node of zeros."""
    node = counters[FREE_NODE]
    if node:
        counters[FREE_NODE] = nodes[node, NEXT]
    else:
        node = counters[ROWS]
        counters[ROWS] += 1
    counters[LIVE] += 1
    nodes[node] = 0
    return int(node)


@njit(cache=True, nogil=True)
def _free(nodes: Int32, counters: Int64, node: int) -> None:
    nodes[node, NEXT] = counters[FREE_NODE]
    counters[FREE_NODE] = node
    counters[LIVE] -= 1


@njit(cache=True, nogil=True)
def _child(nodes: Int32, table: Int64, node: int, token: int) -> int:
    """The child of a node whose edge begins with a token; 0 if there is none."""
    children = nodes[node, CHILDREN]
    if children < 2:
        child = nodes[node, CHILD]
        return child if children and nodes[child, FIRST] == token else 0
    mask = table.size - 1
    key = _hash(node, token)
    i = key & mask
    while table[i]:
        if table[i] >> 32 == key:
            child = table[i] & 0xFFFFFFFF
            if nodes[child, PARENT] == node and nodes[child, FIRST] == token:
                return int(child)
        i = (i + 1) & mask
    return 0


@njit(cache=True, nogil=True)
def _hash(node: int, token: int) -> int:
    """31 bits."""
    x = (np.uint64(node) << np.uint64(32)) ^ np.uint64(np.uint32(token))
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return int(x >> np.uint64(33))


@njit(cache=True, nogil=True)
def _place(nodes: Int32, table: Int64, child: int) -> int:
    """Where a child stands in the table."""
    mask = table.size - 1
    key = _hash(nodes[child, PARENT], nodes[child, FIRST])
    entry, i = (key << 32) + child, key & mask
    while table[i] != entry:
        i = (i + 1) & mask
    return int(i)


@njit(cache=True, nogil=True)
def _put(nodes: Int32, table: Int64, counters: Int64, child: int) -> None:
    mask = table.size - 1
    key = _hash(nodes[child, PARENT], nodes[child, FIRST])
    i = key & mask
    while table[i]:
        i = (i + 1) & mask
    table[i] = (key << 32) + child
    counters[ENTRIES] += 1


@njit(cache=True, nogil=True)
def _drop(nodes: Int32, table: Int64, counters: Int64, child: int) -> None:
    """Takes a child out of the table and moves up what stands behind it only because its own place was taken."""
    mask = table.size - 1
    hole = _place(nodes, table, child)
    i = (hole + 1) & mask
    while table[i]:
        if (i - (table[i] >> 32)) & mask >= (i - hole) & mask:
            table[hole] = table[i]
            hole = i
        i = (i + 1) & mask
    table[hole] = 0
    counters[ENTRIES] -= 1


@njit(cache=True, nogil=True)
def _find(tree: Tree, text: Int32, start: int, end: int) -> tuple[int, int]:
    """Where ``text[start:end]`` ends in the tree: (node, tokens of its edge); (0, 0) if it does not occur."""
    node, used = 0, 0
    while start < end:
        node, used = _child(tree.nodes, tree.table, node, text[start]), 1
        if not node:
            return 0, 0
        start += 1
        at = tree.nodes[node, AT]
        length = tree.nodes[node, LENGTH]
        while used < length and start < end:
            at = _following(tree.next_page, at)
            if tree.tokens[at] != text[start]:
                return 0, 0
            start += 1
            used += 1
    return node, used


@njit(cache=True, nogil=True)
def _longest_followed(tree: Tree, context: Int32, length: int) -> int:
    """The longest match of the context's end, not all of it, that some token follows in the tree: its own end follows
    too if it is shortened, so halving finds it."""
    low, high = 0, length - 1
    while low < high:
        match = (low + high + 1) // 2
        node, used = _find(tree, context, length - match, length)
        if node and (used < tree.nodes[node, LENGTH] or tree.nodes[node, CHILD]):
            low = match
        else:
            high = match - 1
    return low


@njit(cache=True, nogil=True)
def _end(tree: Tree, context: Int32, start: int, length: int) -> tuple[int, int, int]:
    """Where ``context[start:length]``, which occurs, ends: (node, tokens of its edge, place of the last of these)."""
    node, used = _find(tree, context, start, length)
    at = tree.nodes[node, AT]
    for _ in range(used - 1):
        at = _following(tree.next_page, at)
    return node, used, at


@njit(cache=True, nogil=True)
def _draft(
    tree: Tree, context: Int32, start: int, length: int, limit: int, min_probability: float, row: int
) -> tuple[int, float]:
    """Follows the most frequent child from where ``context[start:length]`` ends.

    Returns:
        (tokens, put into ``row`` of ``drafts``; score)
    """
    nodes = tree.nodes
    node, used, at = _end(tree, context, start, length)
    n, score, probability = 0, 0.0, 1.0
    while n < limit:
        if used < nodes[node, LENGTH]:
            at = _following(tree.next_page, at)
            used += 1
        else:
            child = _best_child(nodes, node)
            if not child:
                break
            probability *= nodes[child, COUNT] / nodes[node, COUNT]
            node, at, used = child, nodes[child, AT], 1
        if probability < min_probability:
            break
        tree.drafts[row, n], tree.probabilities[row, n] = tree.tokens[at], probability
        score += probability
        n += 1
    return n, score


@njit(cache=True, nogil=True)
def _grow(
    tree: Tree,
    context: Int32,
    start: int,
    length: int,
    limit: int,
    depth: int,
    width: int,
    min_probability: float,
) -> tuple[Int64, Int64, Float32, float]:
    """Adds the most probable token that follows what is drafted, one after the other; among equals the one whose parent
    was added first, among its children the most frequent one, then the one entered last.

    Returns:
        (tokens, parents, probabilities, each [nodes ≤ limit]; score)
    """
    nodes = tree.nodes
    tokens, parents = np.empty(limit, np.int64), np.empty(limit, np.int64)
    probabilities = np.empty(limit, np.float32)
    # What may come next, in order of discovery: node, tokens of its edge, place of the last of these, parent, depth.
    # These exclude each other, so there are no more than 1 / min_probability of them.
    open_ends, chances = np.empty(((limit + 1) * width, 5), np.int64), np.empty((limit + 1) * width, np.float64)
    children = np.empty(width, np.int64)
    n, waiting, score = 0, 0, 0.0
    node, used, at = _end(tree, context, start, length)
    parent, level, probability = -1, 0, 1.0
    while n < limit:
        if level < depth and used < nodes[node, LENGTH]:
            end = open_ends[waiting]
            end[0], end[1], end[2], end[3], end[4] = node, used + 1, _following(tree.next_page, at), parent, level + 1
            chances[waiting] = probability
            waiting += 1
        elif level < depth:
            for child in children[: _top_children(nodes, node, children)]:
                chance = probability * (nodes[child, COUNT] / nodes[node, COUNT])
                if chance < min_probability:
                    break
                end = open_ends[waiting]
                end[0], end[1], end[2], end[3], end[4] = child, 1, nodes[child, AT], parent, level + 1
                chances[waiting] = chance
                waiting += 1
        if not waiting:
            break
        first = int(np.argmax(chances[:waiting]))
        probability = chances[first]
        node, used, at, parents[n], level = open_ends[first]
        tokens[n], probabilities[n] = tree.tokens[at], probability
        score += probability
        parent, n, waiting = n, n + 1, waiting - 1
        for i in range(first, waiting):
            open_ends[i], chances[i] = open_ends[i + 1], chances[i + 1]
    return tokens[:n], parents[:n], probabilities[:n], score


@njit(cache=True, nogil=True)
def _top_children(nodes: Int32, node: int, out: Int64) -> int:
    """Puts the children with the largest counts into ``out``, in this order, among equals the one entered last first.

    Returns:
        how many.
    """
    n, child = 0, nodes[node, CHILD]
    while child:
        i = n
        while i > 0:
            lead = nodes[child, COUNT] - nodes[out[i - 1], COUNT]
            if lead < 0 or (lead == 0 and nodes[child, STAMP] < nodes[out[i - 1], STAMP]):
                break
            if i < out.size:
                out[i] = out[i - 1]
            i -= 1
        if i < out.size:
            out[i] = child
            n = min(n + 1, out.size)
        child = nodes[child, NEXT]
    return n


@njit(cache=True, nogil=True)
def _best_child(nodes: Int32, node: int) -> int:
    """The child with the largest count, among equals the one entered last; 0 if there is none."""
    best = nodes[node, BEST]
    if best or not nodes[node, CHILD]:
        return int(best)
    best, second = nodes[node, CHILD], 0
    child = nodes[best, NEXT]
    while child:
        lead = nodes[best, COUNT] - nodes[child, COUNT]
        if lead > 0 or (lead == 0 and nodes[best, STAMP] > nodes[child, STAMP]):
            second = max(second, nodes[child, COUNT])
        else:
            best, second = child, nodes[best, COUNT]
        child = nodes[child, NEXT]
    nodes[node, BEST], nodes[node, SECOND] = best, second
    return int(best)
