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
from numba import njit

from .functions import exp, tanh
from .simd import LANES, const, fma, lane_max, lane_sum, load, maximum, splat, store, store_first

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
def _scores(queries: Floats, k_cache: Floats, head: int, table: Int32, first: int, end: int, scores: Floats) -> None:
    """Dot products of the tile's queries [TILE, head_dim] with all keys of blocks first … end − 1."""
    heads, head_dim = k_cache.shape[1], k_cache.shape[2]
    width = scores.shape[1]
    for block in range(first, end):
        base = (table[block] * heads + head) * head_dim * LANES
        s0 = s1 = s2 = s3 = const(0.0)
        for d in range(head_dim):
            key = load(k_cache, base + d * LANES)
            s0 = fma(splat(queries[0, d]), key, s0)
            s1 = fma(splat(queries[1, d]), key, s1)
            s2 = fma(splat(queries[2, d]), key, s2)
            s3 = fma(splat(queries[3, d]), key, s3)
        at = block * LANES
        store(scores, at, s0)
        store(scores, width + at, s1)
        store(scores, 2 * width + at, s2)
        store(scores, 3 * width + at, s3)


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
    number = context
    for other in range(first_row, row + 1):
        if slots[other] < 0 or (ancestors.size and not (ancestors[row] >> (other - first_row)) & 1):
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
    total: Any, weights: Floats, keys: Int32, t: int, low: int, high: int, v_cache: Floats, table: Int32, at: int
) -> Any:
    """total + Σ weight · value over the keys numbered low … high − 1; 16 dimensions, ``at`` their place in a block."""
    width = v_cache.shape[3]
    block_size = v_cache.shape[1] * LANES * width
    for number in range(low, high):
        key = keys[t, number]
        base = table[key // LANES] * block_size + key % LANES * width
        total = fma(splat(weights[t, number]), load(v_cache, base + at), total)
    return total


@njit(cache=True, nogil=True)
def _weighted_tile(totals: Any, weights: Floats, low: int, high: int, v_cache: Floats, table: Int32, at: int) -> Any:
    """The same for all four queries at once, over context keys that all of them see."""
    o0, o1, o2, o3 = totals
    width = v_cache.shape[3]
    block_size = v_cache.shape[1] * LANES * width
    for block in range(low // LANES, (high + LANES - 1) // LANES):
        base = table[block] * block_size + at
        for number in range(max(low, block * LANES), min(high, (block + 1) * LANES)):
            value = load(v_cache, base + number % LANES * width)
            o0 = fma(splat(weights[0, number]), value, o0)
            o1 = fma(splat(weights[1, number]), value, o1)
            o2 = fma(splat(weights[2, number]), value, o2)
            o3 = fma(splat(weights[3, number]), value, o3)
    return o0, o1, o2, o3


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
    for lane in range(0, head_dim, LANES):
        at = head * LANES * v_cache.shape[3] + lane
        zero = const(0.0)
        o0 = _weighted(zero, weights, keys, 0, lows[0], min(begin, highs[0]), v_cache, table, at)
        o1 = _weighted(zero, weights, keys, 1, lows[1], min(begin, highs[1]), v_cache, table, at)
        o2 = _weighted(zero, weights, keys, 2, lows[2], min(begin, highs[2]), v_cache, table, at)
        o3 = _weighted(zero, weights, keys, 3, lows[3], min(begin, highs[3]), v_cache, table, at)
        o0, o1, o2, o3 = _weighted_tile((o0, o1, o2, o3), weights, begin, end, v_cache, table, at)
        o0 = _weighted(o0, weights, keys, 0, max(end, lows[0]), highs[0], v_cache, table, at)
        o1 = _weighted(o1, weights, keys, 1, max(end, lows[1]), highs[1], v_cache, table, at)
        o2 = _weighted(o2, weights, keys, 2, max(end, lows[2]), highs[2], v_cache, table, at)
        o3 = _weighted(o3, weights, keys, 3, max(end, lows[3]), highs[3], v_cache, table, at)
        count = min(LANES, head_dim - lane)
        store_first(out, targets[0] + lane, o0 / splat(sums[0]), count)
        store_first(out, targets[1] + lane, o1 / splat(sums[1]), count)
        store_first(out, targets[2] + lane, o2 / splat(sums[2]), count)
        store_first(out, targets[3] + lane, o3 / splat(sums[3]), count)


@njit(
    "void(f4[:, :, :], f4[:, :, :, ::1], f4[:, :, :, ::1], f4[:, ::1], i4[:, ::1], i8, i8, i8, i4[::1], i4[::1],"
    " i4[:, :], i8[::1], i8[::1], i8[::1], b1[::1], f8, f8, i8)",
    cache=True,
    nogil=True,
)
def attend(
    q: Floats,
    k_cache: Floats,
    v_cache: Floats,
    out: Floats,
    units: Int32,
    first_unit: int,
    end_unit: int,
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
) -> None:
    """Attention of the rows in some units of work, whose keys and values have been written.

    Args:
        q: [R, heads, head_dim], rows may lie apart.
        k_cache: see the module; like ``v_cache``.
        out: [R, heads · head_dim].
        units: [U, 3] sequence, first and end row within it. Work is numbered unit · kv heads + kv head.
        first_unit, end_unit: the range of work to do.
        longest: most keys that any row may look at.
        ancestors: [R] or empty.
        chains: [S] whether positions, slots and ancestors are those of plain text, so that row i simply sees the
            context and rows 0 … i.
        scale, softcap, window: 0 = none for the last two.
    """
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
    for number in range(first_unit, end_unit):
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
                lows[t] = max(0, positions[row] - window + 1) if window else 0
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


@njit("Tuple((i4[:, ::1], b1[::1], i8[::1]))(i4[::1], i4[::1], i8[::1], i8[::1], b1, i8)", cache=True, nogil=True)
def plan_work(
    query_start: Int32, context_lens: Int32, slots: Int64, positions: Int64, trees: bool, unit_rows: int
) -> tuple[Int32, npt.NDArray[np.bool_], Int64]:
    """Splits a pass into units of at most ``unit_rows`` rows of one sequence.

    Returns:
        units [U, 3]; chains [S] (both as ``attend`` wants them); cost [U + 1], cumulative, in row · key.
    """
    sequences = context_lens.size
    count = 0
    for s in range(sequences):
        count += (query_start[s + 1] - query_start[s] + unit_rows - 1) // unit_rows
    units = np.empty((count, 3), np.int32)
    cost = np.zeros(count + 1, np.int64)
    chains = np.empty(sequences, np.bool_)
    unit = 0
    for s in range(sequences):
        begin, end = query_start[s], query_start[s + 1]
        chains[s] = not trees
        for row in range(begin, end):
            if slots[row] < 0 or positions[row] != context_lens[s] + row - begin:
                chains[s] = False
        for first in range(0, end - begin, unit_rows):
            stop = min(first + unit_rows, end - begin)
            units[unit] = (s, first, stop)
            cost[unit + 1] = cost[unit] + (stop - first) * (context_lens[s] + stop)
            unit += 1
    return units, chains, cost
