"""Paged attention on CPU, with float32 sums, and its pages of keys and values.

A page holds 16 keys with the keys as vector lanes, K [pages, kv heads, head_dim rounded up to 2, 16], and 16 values
with the head's dimensions as lanes, V [pages, kv heads, 16, head_dim rounded up to 16], as float32 or as bfloat16 in
uint16. Of bfloat16 each two dimensions of keys, or each two values, are words of two numbers side by side, see
``simd.place_of``. What is written is rounded once; all who read it see the same numbers, so bits do not depend on who
has written them.

On a cache in bfloat16 queries and the weights of values are rounded to bfloat16, too, as models in bfloat16 do it on a
GPU. ``simd.multiply_add`` then multiplies two numbers at a time where the processor can, in the same order, so to the
same bits.

The visible keys of a row are numbered densely, so a path through a tree gives the bits that the same chain would.
Blocks of ``KEYS`` numbers are attended to one by one, each with a softmax of its own, and their results are merged in
order. Four query vectors that share a KV head are worked on at a time, so that a key is loaded once for four, and a
block is used for all vectors of a unit of work while it is in the cache.

For every query vector the order of float operations depends on nothing but its own row: a dot product runs over
head_dim, a block's softmax sum over its visible keys in 16 lanes, the weighted sum over its visible keys one by one.
So blocks may also be shared out over threads, their results kept, and merged in the same order afterwards.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import compile_for, copy_row, njit

from .attention_tile import TILE, Floats, Int32, Int64, Kept, multiply_keys, put_query, softmax, weigh_values
from .functions import exp
from .simd import LANES, as_element, const, fma, lane_sum, load, maximum, place_of, splat, store, store_first
from .team import together

KEYS = 256
"""Keys of a block: few enough to stay in the core's cache, many enough that merging costs nothing."""
_ATTEND = (
    "void(f4[:, :, :], {0}[:, :, :, ::1], {0}[:, :, :, ::1], f4[:, ::1], i4[:, ::1], i8[::1], i8[::1], i4[::1],"
    " i4[::1], i4[:, :], i8[::1], i8[::1], i8[::1], b1[::1], f8, f8, i8, i8)"
)
_WRITE = "void(f4[:, :, :], f4[:, :, :], {0}[:, :, :, ::1], {0}[:, :, :, ::1], i8[::1])"
NOTHING = -3e38
"""Peak of a result over no keys."""


@njit(_WRITE.format("f4"), cache=True, nogil=True, allocates=False)
def write_kv(k: Floats, v: Floats, k_cache: Kept, v_cache: Kept, slots: Int64) -> None:
    """Writes k and v [R, kv heads, head_dim] at ``slots`` [R]; rows with slot −1 are skipped."""
    rows, heads, head_dim = k.shape
    width = v_cache.shape[3]
    for row in range(rows):
        if slots[row] < 0:
            continue
        block, offset = slots[row] // LANES, slots[row] % LANES
        for head in range(heads):
            keys, values = k_cache[block, head].reshape(-1), v_cache[block, head].reshape(-1)
            for d in range(head_dim):
                keys[place_of(keys, d, offset, LANES)] = as_element(keys, k[row, head, d])
                values[place_of(values, offset, d, width)] = as_element(values, v[row, head, d])
            if head_dim % 2:
                keys[place_of(keys, head_dim, offset, LANES)] = 0


@njit(cache=True, nogil=True)
def move_kv(k_cache: Kept, v_cache: Kept, source: Int64, target: Int64) -> None:
    """Copies what is at the slots ``source`` [n] to ``target`` [n]; all is read before anything is written."""
    heads, head_dim, width = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    keys, values = (
        np.empty((source.size, heads, head_dim), k_cache.dtype),
        np.empty((source.size, heads, width), v_cache.dtype),
    )
    for i in range(source.size):
        block, offset = source[i] // LANES, source[i] % LANES
        for head in range(heads):
            kept_keys, kept_values = k_cache[block, head].reshape(-1), v_cache[block, head].reshape(-1)
            for d in range(head_dim):
                keys[i, head, d] = kept_keys[place_of(kept_keys, d, offset, LANES)]
            for d in range(width):
                values[i, head, d] = kept_values[place_of(kept_values, offset, d, width)]
    for i in range(source.size):
        block, offset = target[i] // LANES, target[i] % LANES
        for head in range(heads):
            kept_keys, kept_values = k_cache[block, head].reshape(-1), v_cache[block, head].reshape(-1)
            for d in range(head_dim):
                kept_keys[place_of(kept_keys, d, offset, LANES)] = keys[i, head, d]
            for d in range(width):
                kept_values[place_of(kept_values, offset, d, width)] = values[i, head, d]


@njit(cache=True, nogil=True, allocates=False)
def blocks_of(keys: int) -> int:
    """Blocks that so many keys lie in."""
    return (keys + KEYS - 1) // KEYS


@njit(cache=True, nogil=True, allocates=False)
def _number_keys(
    keys: Int32,
    low: int,
    context: int,
    row: int,
    first_row: int,
    slots: Int64,
    positions: Int64,
    ancestors: Int64,
    window: int,
) -> tuple[int, int]:
    """Numbers the row's visible keys of this pass from ``context`` on: number n is key keys[n − context].

    Returns the range of numbers that the row sees, given that of the context it sees all from ``low`` on.
    """
    number, branches = context, ancestors.size > 0 and ancestors[row] != -1
    for other in range(first_row, row + 1):
        if slots[other] < 0 or (branches and not (ancestors[row] >> (other - first_row)) & 1):
            continue
        keys[number - context] = context + other - first_row
        number += 1
        if window and positions[other] <= positions[row] - window:
            low = number
    return low, number


@njit(cache=True, nogil=True, allocates=False)
def _merge(whole: Floats, to: int, part: Floats, at: int, width: int) -> None:
    """Adds a result over some keys, ``part`` from ``at`` on, to the one over keys before, ``whole`` from ``to`` on.

    A result is Σ weight · value [width], Σ weight in 16 lanes, and the peak that the weights are relative to.
    """
    before, peak = load(whole, to + width + LANES), load(part, at + width + LANES)
    top = maximum(peak, before)
    keep, add = exp(before - top), exp(peak - top)
    for lane in range(0, width + LANES, LANES):
        store(whole, to + lane, fma(load(part, at + lane), add, load(whole, to + lane) * keep))
    store(whole, to + width + LANES, top)


@njit(cache=True, nogil=True, allocates=False)
def _clear(result: Floats, at: int, width: int) -> None:
    """The result over no keys."""
    for lane in range(0, width + LANES, LANES):
        store(result, at + lane, const(0.0))
    store(result, at + width + LANES, const(NOTHING))


@njit(cache=True, nogil=True, allocates=False)
def _put(out: Floats, target: int, head_dim: int, result: Floats, at: int, width: int) -> None:
    """Σ weight · value / Σ weight, 0 where no key was seen."""
    total = lane_sum(load(result, at + width))
    if total == 0.0:
        total = np.float32(1.0)
    for lane in range(0, head_dim, LANES):
        store_first(out, target + lane, load(result, at + lane) / splat(total), min(LANES, head_dim - lane))


class Work(NamedTuple):
    """What ``attend`` is given, which says what each is, and what it keeps."""

    q: Floats
    k_cache: Kept
    v_cache: Kept
    out: Floats
    parts: Floats
    """[kept[S], width + 32] results of query vectors over blocks; empty if all are in ``out``."""
    units: Int32
    bounds: Int64
    kept: Int64
    query_start: Int32
    context_lens: Int32
    block_tables: Int32
    slots: Int64
    positions: Int64
    ancestors: Int64
    chains: npt.NDArray[np.bool_]
    scale: float
    softcap: float
    window: int
    hidden_keys: int


@njit(cache=True, nogil=True, allocates=False)
def next_page(number: int, page: int, stop: int, kv_heads: int, work: Work) -> tuple[int, int]:
    """The page of keys that a thread reads after a page of its work ``number``, and in which work; work ``stop`` if
    there is none."""
    if number == stop:
        return number, page
    most_pages, unit = work.block_tables.shape[1], number // kv_heads
    page += 1
    keys = min(work.units[unit, 4] * KEYS, work.context_lens[work.units[unit, 0]] + work.units[unit, 2])
    if page < most_pages and page * LANES < keys:
        return number, page
    number += 1
    if number < stop:
        unit, low = number // kv_heads, work.hidden_keys
        if work.window:
            row = work.query_start[work.units[unit, 0]] + work.units[unit, 1]
            low = max(low, work.positions[row] - work.window + 1)
        page = min(max(low, work.units[unit, 3] * KEYS) // LANES, most_pages - 1)
    return number, page


@njit(cache=True, nogil=True, allocates=False)
def _plan_fetches(next_keys: Int64, number: int, page: int, stop: int, kv_heads: int, work: Work) -> tuple[int, int]:
    """Writes what is read after a page into ``next_keys``, see ``attention_tile``: as much as there is room.

    Returns:
        Up to where that is.
    """
    for i in range(next_keys.size):
        number, page = next_page(number, page, stop, kv_heads, work)
        next_keys[i] = -1
        if number < stop:
            next_keys[i] = work.block_tables[work.units[number // kv_heads, 0], page] * kv_heads + number % kv_heads
    return number, page


@njit(cache=True, nogil=True, allocates=False)
def _attend_units(begin: int, stop: int, scratch: Any, work: Work) -> None:
    """Work begin … stop − 1 of ``attend``, see ``_share``."""
    scores, weight_pairs, keys, queries, wholes, results, lows, highs, starts, ends, lines, next_keys = scratch
    q, k_cache, v_cache, parts, kept, block_tables = (
        work.q, work.k_cache, work.v_cache, work.parts, work.kept, work.block_tables
    )  # fmt: skip
    query_start, positions, hidden_keys, window = work.query_start, work.positions, work.hidden_keys, work.window
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads, width = k_cache.shape[1], v_cache.shape[3]
    group, stride = heads // kv_heads, width + 2 * LANES
    ahead_number, ahead_page = begin, 0  # up to where keys have been fetched
    for number in range(begin, stop):
        sequence, first, end, first_block, end_block = work.units[number // kv_heads]
        head = number % kv_heads
        first_row, context, table = query_start[sequence], work.context_lens[sequence], block_tables[sequence]
        vectors = (end - first) * group
        padded = (vectors + TILE - 1) // TILE * TILE
        for row in range(first_row + first, first_row + end):
            low = max(hidden_keys, positions[row] - window + 1) if window else hidden_keys
            high = context + row - first_row + 1
            at = (row - first_row - first) * group
            if not work.chains[sequence]:
                line = keys[row - first_row - first]
                low, high = _number_keys(
                    line, min(low, context), context, row, first_row, work.slots, positions, work.ancestors, window
                )
            lows[at : at + group] = low
            highs[at : at + group] = high
            for i in range(group):
                put_query(q[row, head * group + i], work.scale, k_cache, queries[at + i])
        # The last tile is filled up with the last query, whose result is then computed more than once.
        for vector in range(vectors, padded):
            copy_row(queries[vectors - 1], queries[vector])
            lows[vector], highs[vector] = lows[vectors - 1], highs[vectors - 1]
        for vector in range(vectors):
            _clear(wholes, vector * stride, width)
        limit = highs[vectors - 1] if work.chains[sequence] else context
        for block in range(first_block, end_block):
            start = block * KEYS
            for tile in range(0, padded, TILE):
                first_page, end_page = (start + KEYS) // LANES, 0
                for t in range(TILE):
                    vector = tile + t
                    lines[t] = min(vector, vectors - 1) // group
                    starts[t] = min(max(lows[vector], start), start + KEYS)
                    ends[t] = max(min(highs[vector], start + KEYS), starts[t])
                    if starts[t] < ends[t]:
                        last = ends[t] - 1 if ends[t] <= limit else keys[lines[t], ends[t] - 1 - context]
                        first_page, end_page = min(first_page, starts[t] // LANES), max(end_page, last // LANES + 1)
                if first_page < end_page:
                    multiply_keys(
                        queries, tile, k_cache, head, table, start, first_page, end_page, v_cache, tile == 0, scores
                    )
                for t in range(TILE):
                    if starts[t] < ends[t]:
                        for place in range(max(starts[t], limit), ends[t]):
                            scores[t, place - start] = scores[t, keys[lines[t], place - context] - start]
                        softmax(
                            scores, t, starts[t] - start, ends[t] - start, work.softcap, k_cache, weight_pairs, results,
                            t * stride + width,
                        )  # fmt: skip
                if first_page < end_page:
                    soon = next_keys[: end_page - first_page]
                    if tile == 0:
                        if (ahead_number, ahead_page) < (number, end_page - 1):
                            ahead_number, ahead_page = number, end_page - 1
                        ahead_number, ahead_page = _plan_fetches(soon, ahead_number, ahead_page, stop, kv_heads, work)
                    else:
                        soon[:] = -1
                    weigh_values(
                        scores,
                        weight_pairs,
                        start,
                        starts,
                        ends,
                        v_cache,
                        head,
                        table,
                        keys,
                        lines,
                        limit,
                        k_cache,
                        soon,
                        results,
                    )
                for t in range(min(TILE, vectors - tile)):
                    if kept.size:
                        row = first_row + first + (tile + t) // group
                        own = (row - first_row) * heads + head * group + (tile + t) % group
                        blocks = blocks_of(context + query_start[sequence + 1] - first_row)
                        part = kept[sequence] + own * blocks + block
                        copy_row(results[t], parts[part])
                        if starts[t] == ends[t]:
                            _clear(parts, part * stride, width)
                    elif starts[t] < ends[t]:
                        _merge(wholes, (tile + t) * stride, results, t * stride, width)
        if not kept.size:
            for vector in range(vectors):
                row, query_head = first_row + first + vector // group, head * group + vector % group
                _put(work.out, (row * heads + query_head) * head_dim, head_dim, wholes, vector * stride, width)


@njit(cache=True, nogil=True, apart=True)
def _share(thread: int, threads: int, work: Work) -> None:
    """One thread's units of ``attend``: into ``out``, or block by block into ``parts`` if there are any."""
    heads, head_dim = work.q.shape[1], work.q.shape[2]
    kv_heads, width = work.k_cache.shape[1], work.v_cache.shape[3]
    group, stride = heads // kv_heads, width + 2 * LANES
    begin, stop = work.bounds[thread], work.bounds[thread + 1]
    most_rows, most_vectors = 0, 0
    for sequence in range(work.context_lens.size):
        most_rows = max(most_rows, work.query_start[sequence + 1] - work.query_start[sequence])
    for number in range(begin, stop):
        _, first, end, _, _ = work.units[number // kv_heads]
        most_vectors = max(most_vectors, (end - first) * group)
    most_vectors = (most_vectors + TILE - 1) // TILE * TILE
    most_scores = KEYS + (most_rows + 2 * LANES - 1) // (2 * LANES) * 2 * LANES
    scores, weight_pairs = np.empty((TILE, most_scores), np.float32), np.empty((TILE, most_scores // 2), np.float32)
    keys = np.empty((most_vectors // group + 1, most_rows), np.int32)
    queries = np.empty((most_vectors, (head_dim + 2 * LANES - 1) // (2 * LANES) * 2 * LANES), np.float32)
    wholes = np.empty(most_vectors * stride, np.float32)
    results = np.empty((TILE, stride), np.float32)
    lows, highs = np.empty((2, most_vectors), np.int64)
    starts, ends, lines = np.empty((3, TILE), np.int64)
    next_keys = np.empty(most_scores // LANES, np.int64)
    scratch = scores, weight_pairs, keys, queries, wholes, results, lows, highs, starts, ends, lines, next_keys
    _attend_units(begin, stop, scratch, work)


@njit(cache=True, nogil=True)
def _join(
    parts: Floats, kept: Int64, out: Floats, heads: int, query_start: Int32, context_lens: Int32, width: int
) -> None:
    """Merges the blocks' results of every query vector."""
    stride, head_dim = parts.shape[1], out.shape[1] // heads
    whole = np.empty(stride, np.float32)
    for sequence in range(context_lens.size):
        begin, end = query_start[sequence], query_start[sequence + 1]
        part, blocks = kept[sequence], blocks_of(context_lens[sequence] + end - begin)
        for vector in range(begin * heads, end * heads):
            _clear(whole, 0, width)
            for _ in range(blocks):
                if parts[part, width + LANES] != np.float32(NOTHING):
                    _merge(whole, 0, parts, part * stride, width)
                part += 1
            _put(out, vector * head_dim, head_dim, whole, 0, width)


@njit(_ATTEND.format("f4"), cache=True, nogil=True)
def attend(
    q: Floats,
    k_cache: Kept,
    v_cache: Kept,
    out: Floats,
    units: Int32,
    bounds: Int64,
    kept: Int64,
    query_start: Int32,
    context_lens: Int32,
    block_tables: Int32,
    slots: Int64,
    positions: Int64,
    ancestors: Int64,
    chains: npt.NDArray[np.bool_],
    scale: float,
    softcap: float,
    window: int,
    hidden_keys: int,
) -> None:
    """Attention of rows whose keys and values have been written.

    Args:
        q: [R, heads, head_dim], rows may lie apart.
        k_cache: see the module; like ``v_cache``.
        out: [R, heads · head_dim].
        units: [U, 5] sequence, first and end row within it, first and end block of keys. Work is numbered unit · kv
            heads + kv head.
        bounds: [threads + 1] thread i does work bounds[i] … bounds[i + 1] − 1.
        kept: empty: a unit has all blocks of its rows. Otherwise units may have some of them, whose results are kept
            and merged at the end: [S + 1] those of sequence s are kept[s] … kept[s + 1] − 1.
        ancestors: [R] see ``ForwardBatch``; empty = −1 throughout.
        chains: [S] whether positions, slots and ancestors are those of plain text, so that row i simply sees the
            context and rows 0 … i.
        scale, softcap, window: 0 = none for the last two.
        hidden_keys: keys at the beginning of every sequence that no row sees.
    """
    width = v_cache.shape[3]
    parts = np.empty((kept[-1] if kept.size else 0, width + 2 * LANES), np.float32)
    work = Work(
        q, k_cache, v_cache, out, parts, units, bounds, kept, query_start, context_lens, block_tables, slots, positions,
        ancestors, chains, scale, softcap, window, hidden_keys,
    )  # fmt: skip
    if bounds.size == 2:
        _share(0, 1, work)
    else:
        together(_share, bounds.size - 1, (work,))
    if kept.size:
        _join(parts, kept, out, q.shape[1], query_start, context_lens, width)


@cache
def load_bfloat16(dtype: str = "u2") -> None:
    """Makes ``write_kv`` and ``attend`` take caches in bfloat16; once a process, and before they are used.

    Args:
        dtype: of the arrays, as numba names it. In ``i2`` numbers are multiplied one by one on any processor, see
            ``simd.has_dot``.
    """
    compile_for(write_kv, _WRITE.format(dtype))
    compile_for(attend, _ATTEND.format(dtype))
