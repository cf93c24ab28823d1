"""Paged attention on CPU, float32.

Blocks hold 16 keys with the keys as vector lanes, K [blocks, kv heads, head_dim, 16], and 16 values with the head's
dimensions as lanes, V [blocks, kv heads, 16, head_dim rounded up to 16]. Four query vectors that share a KV head
(of one row under GQA, of several rows otherwise) are worked on at a time, so that a key is loaded once for four.

For every query vector the order of float operations depends on nothing but its own row: a dot product runs over
head_dim, the softmax sum over its visible keys in 16 lanes, the weighted sum over its visible keys one by one. The
visible keys of a row are numbered densely, so a path through a tree gives the bits that the same chain would.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .functions import exp, tanh
from .simd import LANES, const, fetch, fma, lane_max, lane_sum, load, maximum, splat, store, store_first
from .team import together

Floats = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

TILE = 4
"""Query vectors worked on at a time."""


@njit("void(f4[:, :, :], f4[:, :, :], f4[:, :, :, ::1], f4[:, :, :, ::1], i8[::1])", cache=True, nogil=True)
def write_kv(k: Floats, v: Floats, k_cache: Floats, v_cache: Floats, slots: Int64) -> None:
    """Writes k and v [R, kv heads, head_dim] at ``slots`` [R]; rows with slot −1 are skipped."""
    rows, heads, head_dim = k.shape
    for row in range(rows):
        if slots[row] < 0:
            continue
        block, offset = slots[row] // LANES, slots[row] % LANES
        for head in range(heads):
            for d in range(head_dim):
                k_cache[block, head, d, offset] = k[row, head, d]
                v_cache[block, head, offset, d] = v[row, head, d]


@njit(cache=True, nogil=True)
def move_kv(k_cache: Floats, v_cache: Floats, source: Int64, target: Int64) -> None:
    """Copies what is at the slots ``source`` [n] to ``target`` [n]; all is read before anything is written."""
    heads, head_dim, width = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    keys, values = (
        np.empty((source.size, heads, head_dim), np.float32),
        np.empty((source.size, heads, width), np.float32),
    )
    for i in range(source.size):
        block, offset = source[i] // LANES, source[i] % LANES
        for head in range(heads):
            for d in range(head_dim):
                keys[i, head, d] = k_cache[block, head, d, offset]
            values[i, head] = v_cache[block, head, offset]
    for i in range(source.size):
        block, offset = target[i] // LANES, target[i] % LANES
        for head in range(heads):
            for d in range(head_dim):
                k_cache[block, head, d, offset] = keys[i, head, d]
            v_cache[block, head, offset] = values[i, head]


@njit(cache=True, nogil=True)
def _scores(queries: Floats, k_cache: Floats, head: int, table: Int32, first: int, end: int, scores: Floats) -> None:
    """Dot products of the tile's queries [TILE, head_dim] with all keys of blocks first … end − 1.

    Two blocks at a time: eight sums that do not wait for each other.
    """
    heads, head_dim = k_cache.shape[1], k_cache.shape[2]
    width = scores.shape[1]
    for block in range(first, end, 2):
        after = min(block + 1, end - 1)
        base = (table[block] * heads + head) * head_dim * LANES
        base_after = (table[after] * heads + head) * head_dim * LANES
        soon, soon_after = table[min(block + 2, end - 1)], table[min(block + 3, end - 1)]
        next_base, next_after = (soon * heads + head) * head_dim * LANES, (soon_after * heads + head) * head_dim * LANES
        s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = const(0.0)
        for d in range(head_dim):
            fetch(k_cache, next_base + d * LANES)
            fetch(k_cache, next_after + d * LANES)
            key, key_after = load(k_cache, base + d * LANES), load(k_cache, base_after + d * LANES)
            q0, q1, q2, q3 = splat(queries[0, d]), splat(queries[1, d]), splat(queries[2, d]), splat(queries[3, d])
            s0, t0 = fma(q0, key, s0), fma(q0, key_after, t0)
            s1, t1 = fma(q1, key, s1), fma(q1, key_after, t1)
            s2, t2 = fma(q2, key, s2), fma(q2, key_after, t2)
            s3, t3 = fma(q3, key, s3), fma(q3, key_after, t3)
        at, at_after = block * LANES, after * LANES
        store(scores, at, s0)
        store(scores, width + at, s1)
        store(scores, 2 * width + at, s2)
        store(scores, 3 * width + at, s3)
        store(scores, at_after, t0)
        store(scores, width + at_after, t1)
        store(scores, 2 * width + at_after, t2)
        store(scores, 3 * width + at_after, t3)


@njit(cache=True, nogil=True)
def _softmax(scores: Floats, t: int, low: int, high: int, softcap: float) -> Any:
    """scores[t, low:high] → exp(score − max) in place; returns their sum, 1 if there are none.

    Works on whole vectors: what lies around the range inside them becomes 0.
    """
    if low >= high:
        return np.float32(1.0)
    lowest = np.float32(-np.inf)
    begin = low // LANES * LANES
    end = (high + LANES - 1) // LANES * LANES
    base = t * scores.shape[1]
    if softcap > 0.0:
        for at in range(base + begin, base + end, LANES):
            store(scores, at, tanh(load(scores, at) / const(softcap)) * const(softcap))
    scores[t, begin:low] = lowest
    scores[t, high:end] = lowest
    top = const(-np.inf)
    for at in range(base + begin, base + end, LANES):
        top = maximum(load(scores, at), top)
    peak = splat(lane_max(top))
    total = const(0.0)
    for at in range(base + begin, base + end, LANES):
        weight = exp(load(scores, at) - peak)
        store(scores, at, weight)
        total = total + weight
    return lane_sum(total)


@njit(cache=True, nogil=True)
def _number_keys(
    scores: Floats,
    keys: Int32,
    t: int,
    low: int,
    context: int,
    row: int,
    first_row: int,
    slots: Int64,
    positions: Int64,
    ancestors: Int64,
    window: int,
) -> tuple[int, int]:
    """Numbers the row's visible keys of this pass from ``context`` on, and moves their scores there.

    Returns the range of numbers that the row sees, given that of the context it sees all from ``low`` on.
    """
    number, branches = context, ancestors.size > 0 and ancestors[row] != -1
    for other in range(first_row, row + 1):
        if slots[other] < 0 or (branches and not (ancestors[row] >> (other - first_row)) & 1):
            continue
        key = context + other - first_row
        keys[t, number] = key
        scores[t, number] = scores[t, key]
        number += 1
        if window and positions[other] <= positions[row] - window:
            low = number
    return low, number


@njit(cache=True, nogil=True)
def _weighted(
    totals: Any, weights: Floats, keys: Int32, t: int, low: int, high: int, v_cache: Floats, table: Int32, at: Any
) -> Any:
    """totals + Σ weight · value over the keys numbered low … high − 1.

    Two vectors of 16 dimensions, ``at`` their places in a block.
    """
    first, second = totals
    width = v_cache.shape[3]
    block_size = v_cache.shape[1] * LANES * width
    for number in range(low, high):
        key = keys[t, number]
        base = table[key // LANES] * block_size + key % LANES * width
        weight = splat(weights[t, number])
        first = fma(weight, load(v_cache, base + at[0]), first)
        second = fma(weight, load(v_cache, base + at[1]), second)
    return first, second


@njit(cache=True, nogil=True)
def _weighted_tile(totals: Any, weights: Floats, low: int, high: int, v_cache: Floats, table: Int32, at: Any) -> Any:
    """The same for all four queries at once, over context keys that all of them see."""
    (a0, b0), (a1, b1), (a2, b2), (a3, b3) = totals
    width = v_cache.shape[3]
    block_size = v_cache.shape[1] * LANES * width
    last = (high + LANES - 1) // LANES
    for block in range(low // LANES, last):
        base, next_base = table[block] * block_size, table[min(block + 1, last - 1)] * block_size
        for number in range(max(low, block * LANES), min(high, (block + 1) * LANES)):
            key, next_key = base + number % LANES * width, next_base + number % LANES * width
            fetch(v_cache, next_key + at[0])
            fetch(v_cache, next_key + at[1])
            first, second = load(v_cache, key + at[0]), load(v_cache, key + at[1])
            w0, w1 = splat(weights[0, number]), splat(weights[1, number])
            w2, w3 = splat(weights[2, number]), splat(weights[3, number])
            a0, b0 = fma(w0, first, a0), fma(w0, second, b0)
            a1, b1 = fma(w1, first, a1), fma(w1, second, b1)
            a2, b2 = fma(w2, first, a2), fma(w2, second, b2)
            a3, b3 = fma(w3, first, a3), fma(w3, second, b3)
    return (a0, b0), (a1, b1), (a2, b2), (a3, b3)


@njit(cache=True, nogil=True)
def _put(out: Floats, target: int, lane: int, head_dim: int, pair: Any, total: float) -> None:
    """Writes two vectors of a head's dimensions ``lane`` … over ``total``; what lies beyond the head is left out."""
    store_first(out, target + lane, pair[0] / splat(total), min(LANES, head_dim - lane))
    if head_dim > lane + LANES:
        store_first(out, target + lane + LANES, pair[1] / splat(total), min(LANES, head_dim - lane - LANES))


@njit(cache=True, nogil=True)
def _values(
    weights: Floats,
    keys: Int32,
    sums: Floats,
    lows: Int64,
    highs: Int64,
    limit: int,
    v_cache: Floats,
    head: int,
    table: Int32,
    out: Floats,
    targets: Int64,
    head_dim: int,
) -> None:
    """Σ weight · value / Σ weight for the tile's queries, into ``out`` at ``targets``.

    Keys below ``limit`` are numbered by their place in the sequence.
    """
    begin = min(lows.max(), limit)
    end = max(begin, min(highs.min(), limit))
    width = v_cache.shape[3]
    zero = const(0.0), const(0.0)
    for lane in range(0, head_dim, 2 * LANES):
        at = head * LANES * width + lane, head * LANES * width + min(lane + LANES, width - LANES)
        o0 = _weighted(zero, weights, keys, 0, lows[0], min(begin, highs[0]), v_cache, table, at)
        o1 = _weighted(zero, weights, keys, 1, lows[1], min(begin, highs[1]), v_cache, table, at)
        o2 = _weighted(zero, weights, keys, 2, lows[2], min(begin, highs[2]), v_cache, table, at)
        o3 = _weighted(zero, weights, keys, 3, lows[3], min(begin, highs[3]), v_cache, table, at)
        o0, o1, o2, o3 = _weighted_tile((o0, o1, o2, o3), weights, begin, end, v_cache, table, at)
        o0 = _weighted(o0, weights, keys, 0, max(end, lows[0]), highs[0], v_cache, table, at)
        o1 = _weighted(o1, weights, keys, 1, max(end, lows[1]), highs[1], v_cache, table, at)
        o2 = _weighted(o2, weights, keys, 2, max(end, lows[2]), highs[2], v_cache, table, at)
        o3 = _weighted(o3, weights, keys, 3, max(end, lows[3]), highs[3], v_cache, table, at)
        _put(out, targets[0], lane, head_dim, o0, sums[0])
        _put(out, targets[1], lane, head_dim, o1, sums[1])
        _put(out, targets[2], lane, head_dim, o2, sums[2])
        _put(out, targets[3], lane, head_dim, o3, sums[3])


@njit(
    "void(i8, i8, f4[:, :, :], f4[:, :, :, ::1], f4[:, :, :, ::1], f4[:, ::1], i4[:, ::1], i8[::1], i8, i4[::1],"
    " i4[::1], i4[:, :], i8[::1], i8[::1], i8[::1], b1[::1], f8, f8, i8, i8)",
    cache=True,
    nogil=True,
)
def _share(
    thread: int,
    threads: int,
    q: Floats,
    k_cache: Floats,
    v_cache: Floats,
    out: Floats,
    units: Int32,
    bounds: Int64,
    longest: int,
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
    """One thread's units of ``attend``."""
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    width = (longest + LANES - 1) // LANES * LANES
    scores = np.empty((TILE, width), np.float32)
    keys = np.empty((TILE, width), np.int32)
    queries = np.empty((TILE, head_dim), np.float32)
    sums = np.empty(TILE, np.float32)
    rows, targets, lows, highs = np.empty((4, TILE), np.int64)
    for t in range(TILE):
        for key in range(width):
            keys[t, key] = key
    for number in range(bounds[thread], bounds[thread + 1]):
        sequence, first, end = units[number // kv_heads]
        head = number % kv_heads
        first_row, context, table = query_start[sequence], context_lens[sequence], block_tables[sequence]
        vectors = (end - first) * group
        for tile in range(0, vectors, TILE):
            for t in range(TILE):
                # The last tile is filled up with its last query, whose result is then written more than once.
                vector = min(tile + t, vectors - 1)
                row = first_row + first + vector // group
                query_head = head * group + vector % group
                rows[t] = row
                targets[t] = (row * heads + query_head) * head_dim
                for d in range(head_dim):
                    queries[t, d] = q[row, query_head, d] * np.float32(scale)
                highs[t] = context + row - first_row + 1
                lows[t] = max(hidden_keys, positions[row] - window + 1) if window else hidden_keys
                if not chains[sequence]:
                    lows[t] = min(lows[t], context)
            last_block = (highs.max() + LANES - 1) // LANES
            _scores(queries, k_cache, head, table, lows.min() // LANES, last_block, scores)
            for t in range(TILE):
                if chains[sequence]:
                    for key in range(context, highs[t]):
                        keys[t, key] = key
                else:
                    lows[t], highs[t] = _number_keys(
                        scores, keys, t, lows[t], context, rows[t], first_row, slots, positions, ancestors, window
                    )
                sums[t] = _softmax(scores, t, lows[t], highs[t], softcap)
            limit = highs.min() if chains[sequence] else context
            _values(scores, keys, sums, lows, highs, limit, v_cache, head, table, out, targets, head_dim)


@njit(
    "void(f4[:, :, :], f4[:, :, :, ::1], f4[:, :, :, ::1], f4[:, ::1], i4[:, ::1], i8[::1], i8, i4[::1], i4[::1],"
    " i4[:, :], i8[::1], i8[::1], i8[::1], b1[::1], f8, f8, i8, i8)",
    cache=True,
    nogil=True,
)
def attend(
    q: Floats,
    k_cache: Floats,
    v_cache: Floats,
    out: Floats,
    units: Int32,
    bounds: Int64,
    longest: int,
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
        units: [U, 3] sequence, first and end row within it. Work is numbered unit · kv heads + kv head.
        bounds: [threads + 1] thread i does work bounds[i] … bounds[i + 1] − 1.
        longest: most keys that any row may look at.
        ancestors: [R] see ``ForwardBatch``; empty = −1 throughout.
        chains: [S] whether positions, slots and ancestors are those of plain text, so that row i simply sees the
            context and rows 0 … i.
        scale, softcap, window: 0 = none for the last two.
        hidden_keys: keys at the beginning of every sequence that no row sees.
    """
    work = (
        q,
        k_cache,
        v_cache,
        out,
        units,
        bounds,
        longest,
        query_start,
        context_lens,
        block_tables,
        slots,
        positions,
        ancestors,
        chains,
        scale,
        softcap,
        window,
        hidden_keys,
    )
    if bounds.size == 2:
        _share(0, 1, *work)
    else:
        together(_share, bounds.size - 1, work)
