"""Paged attention on CPU, computed in float32.

Pages hold 16 keys with the keys as vector lanes, K [pages, kv heads, head_dim, 16], and 16 values with the head's
dimensions as lanes, V [pages, kv heads, 16, head_dim rounded up to 16], as float32 or as bfloat16 in uint16. What is
written is rounded once; all who read it see the same numbers, so bits do not depend on who has written them.

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
from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import compile_for, copy_row, njit

from .functions import exp, tanh
from .simd import (
    HAS_AVX512,
    LANES,
    as_element,
    const,
    fetch,
    fma,
    lane_max,
    lane_sum,
    load,
    maximum,
    splat,
    splat_at,
    store,
    store_first,
)
from .team import together

Floats = npt.NDArray[np.float32]
Kept = npt.NDArray[Any]
"""Of a cache: float32, or bfloat16 as uint16."""
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

TILE = 4
"""Query vectors worked on at a time."""
_PAGES = 2 if HAS_AVX512 else 1
"""Pages whose keys are worked on at a time."""
KEYS = 256
"""Keys of a block: few enough to stay in the core's cache, many enough that merging costs nothing."""
_WRITE = "void(f4[:, :, :], f4[:, :, :], {0}[:, :, :, ::1], {0}[:, :, :, ::1], i8[::1])"
_ATTEND = (
    "void(f4[:, :, :], {0}[:, :, :, ::1], {0}[:, :, :, ::1], f4[:, ::1], i4[:, ::1], i8[::1], i8[::1], i4[::1],"
    " i4[::1], i4[:, :], i8[::1], i8[::1], i8[::1], b1[::1], f8, f8, i8, i8)"
)
"""Of functions that take caches of either dtype."""
NOTHING = -3e38
"""Peak of a result over no keys."""


@njit(_WRITE.format("f4"), cache=True, nogil=True)
def write_kv(k: Floats, v: Floats, k_cache: Kept, v_cache: Kept, slots: Int64) -> None:
    """Writes k and v [R, kv heads, head_dim] at ``slots`` [R]; rows with slot −1 are skipped."""
    rows, heads, head_dim = k.shape
    for row in range(rows):
        if slots[row] < 0:
            continue
        block, offset = slots[row] // LANES, slots[row] % LANES
        for head in range(heads):
            for d in range(head_dim):
                k_cache[block, head, d, offset] = as_element(k_cache, k[row, head, d])
                v_cache[block, head, offset, d] = as_element(v_cache, v[row, head, d])


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
            for d in range(head_dim):
                keys[i, head, d] = k_cache[block, head, d, offset]
            copy_row(v_cache[block, head, offset], values[i, head])
    for i in range(source.size):
        block, offset = target[i] // LANES, target[i] % LANES
        for head in range(heads):
            for d in range(head_dim):
                k_cache[block, head, d, offset] = keys[i, head, d]
            copy_row(values[i, head], v_cache[block, head, offset])


@njit(cache=True, nogil=True)
def blocks_of(keys: int) -> int:
    """Blocks that so many keys lie in."""
    return (keys + KEYS - 1) // KEYS


@njit(cache=True, nogil=True)
def _scores(
    queries: Floats,
    vector: int,
    k_cache: Kept,
    head: int,
    table: Int32,
    start: int,
    first: int,
    end: int,
    cold: bool,
    last: int,
    scores: Floats,
) -> None:
    """Dot products of the queries ``vector`` … ``vector`` + 3 with all keys of the pages first … end − 1.

    ``scores`` [TILE, …] begins with key ``start``. While ``cold``, the pages after these, up to ``last``, are brought
    into the cache.
    """
    heads, head_dim = k_cache.shape[1], k_cache.shape[2]
    width, size = scores.shape[1], head_dim * LANES
    for page in range(first, end, _PAGES):
        # Eight sums that do not wait for each other: of two pages, or of one where they take two registers each.
        after, soon, soon_after = min(page + 1, end - 1), min(page + _PAGES, last), min(page + _PAGES + 1, last)
        k0, k1 = (table[page] * heads + head) * size, (table[after] * heads + head) * size
        n0, n1 = (table[soon] * heads + head) * size, (table[soon_after] * heads + head) * size
        a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = const(0.0)
        for at in range(0, size, LANES):
            i = vector * head_dim + at // LANES
            q0, q1 = splat_at(queries, i), splat_at(queries, i + head_dim)
            q2, q3 = splat_at(queries, i + 2 * head_dim), splat_at(queries, i + 3 * head_dim)
            key = load(k_cache, k0 + at)
            a0, b0, c0, d0 = fma(q0, key, a0), fma(q1, key, b0), fma(q2, key, c0), fma(q3, key, d0)
            if cold:
                fetch(k_cache, n0 + at)
            if _PAGES == 2:
                key = load(k_cache, k1 + at)
                a1, b1, c1, d1 = fma(q0, key, a1), fma(q1, key, b1), fma(q2, key, c1), fma(q3, key, d1)
                if cold:
                    fetch(k_cache, n1 + at)
        _store4(scores, page * LANES - start, width, (a0, b0, c0, d0))
        if _PAGES == 2:
            _store4(scores, after * LANES - start, width, (a1, b1, c1, d1))


@njit(cache=True, nogil=True)
def _store4(out: Floats, at: int, stride: int, vectors: Any) -> None:
    """Writes four vectors, ``stride`` apart."""
    store(out, at, vectors[0])
    store(out, at + stride, vectors[1])
    store(out, at + 2 * stride, vectors[2])
    store(out, at + 3 * stride, vectors[3])


@njit(cache=True, nogil=True)
def _softmax(scores: Floats, t: int, low: int, high: int, softcap: float, result: Floats, at: int) -> None:
    """scores[t, low:high], which are some → exp(score − peak) in place; their sum and the peak go to ``result``.

    Works on whole vectors: what lies around the range inside them becomes 0.
    """
    lowest = np.float32(-np.inf)
    begin = low // LANES * LANES
    end = (high + LANES - 1) // LANES * LANES
    base = t * scores.shape[1]
    if softcap > 0.0:
        for place in range(base + begin, base + end, LANES):
            store(scores, place, tanh(load(scores, place) / const(softcap)) * const(softcap))
    scores[t, begin:low] = lowest
    scores[t, high:end] = lowest
    top = const(-np.inf)
    for place in range(base + begin, base + end, LANES):
        top = maximum(load(scores, place), top)
    peak = splat(lane_max(top))
    total = const(0.0)
    for place in range(base + begin, base + end, LANES):
        weight = exp(load(scores, place) - peak)
        store(scores, place, weight)
        total = total + weight
    store(result, at, total)
    store(result, at + LANES, peak)


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def _weighted(
    totals: Any,
    weights: Floats,
    t: int,
    start: int,
    low: int,
    high: int,
    v_cache: Kept,
    table: Int32,
    at: Any,
    keys: Int32,
    context: int,
) -> Any:
    """totals + Σ weight · value over the keys numbered low … high − 1.

    Four vectors of 16 dimensions, ``at`` their places in a page. Numbers below ``context`` are keys.
    """
    o0, o1, o2, o3 = totals
    width = v_cache.shape[3]
    page_size = v_cache.shape[1] * LANES * width
    for number in range(low, high):
        key = number if number < context else keys[number - context]
        base = table[key // LANES] * page_size + key % LANES * width
        weight = splat(weights[t, number - start])
        o0, o1 = fma(weight, load(v_cache, base + at[0]), o0), fma(weight, load(v_cache, base + at[1]), o1)
        o2, o3 = fma(weight, load(v_cache, base + at[2]), o2), fma(weight, load(v_cache, base + at[3]), o3)
    return o0, o1, o2, o3


@njit(cache=True, nogil=True)
def _weighted_lane(totals: Any, weights: Floats, place: int, keys: int, v_cache: Kept, base: int, ahead: int) -> Any:
    """totals + Σ weight · value for four queries and 16 dimensions, over ``keys`` in a row of one page.

    The weights begin at ``place``, the values at ``base``. What lies ``ahead`` of them is brought into the cache, if
    that is not 0.
    """
    a, b, c, d = totals
    width, stride = v_cache.shape[3], weights.shape[1]
    for number in range(keys):
        at, here = base + number * width, place + number
        value = load(v_cache, at)
        if ahead:
            fetch(v_cache, at + ahead)
        a, b = fma(splat_at(weights, here), value, a), fma(splat_at(weights, here + stride), value, b)
        c = fma(splat_at(weights, here + 2 * stride), value, c)
        d = fma(splat_at(weights, here + 3 * stride), value, d)
    return a, b, c, d


@njit(cache=True, nogil=True)
def _weighted_tile(
    totals: Any,
    weights: Floats,
    start: int,
    low: int,
    high: int,
    v_cache: Kept,
    table: Int32,
    at: Any,
    cold: bool,
    last: int,
) -> Any:
    """The same for all four queries at once, over keys that all of them see.

    While ``cold``, the page after each, up to ``last``, is brought into the cache.
    """
    (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3) = totals
    width, stride = v_cache.shape[3], weights.shape[1]
    page_size = v_cache.shape[1] * LANES * width
    for page in range(low // LANES, (high + LANES - 1) // LANES):
        begin, end = max(low, page * LANES), min(high, (page + 1) * LANES)
        base, place = table[page] * page_size + (begin - page * LANES) * width, begin - start
        ahead = (table[min(page + 1, last)] - table[page]) * page_size if cold else 0
        if HAS_AVX512:
            for number in range(end - begin):
                row, here = base + number * width, place + number
                if ahead:
                    fetch(v_cache, row + at[0] + ahead)
                    fetch(v_cache, row + at[1] + ahead)
                    fetch(v_cache, row + at[2] + ahead)
                    fetch(v_cache, row + at[3] + ahead)
                v0, v1 = load(v_cache, row + at[0]), load(v_cache, row + at[1])
                v2, v3 = load(v_cache, row + at[2]), load(v_cache, row + at[3])
                weight = splat_at(weights, here)
                a0, a1, a2, a3 = fma(weight, v0, a0), fma(weight, v1, a1), fma(weight, v2, a2), fma(weight, v3, a3)
                weight = splat_at(weights, here + stride)
                b0, b1, b2, b3 = fma(weight, v0, b0), fma(weight, v1, b1), fma(weight, v2, b2), fma(weight, v3, b3)
                weight = splat_at(weights, here + 2 * stride)
                c0, c1, c2, c3 = fma(weight, v0, c0), fma(weight, v1, c1), fma(weight, v2, c2), fma(weight, v3, c3)
                weight = splat_at(weights, here + 3 * stride)
                d0, d1, d2, d3 = fma(weight, v0, d0), fma(weight, v1, d1), fma(weight, v2, d2), fma(weight, v3, d3)
        else:  # registers have room for the sums of 16 dimensions
            keys = end - begin
            a0, b0, c0, d0 = _weighted_lane((a0, b0, c0, d0), weights, place, keys, v_cache, base + at[0], ahead)
            a1, b1, c1, d1 = _weighted_lane((a1, b1, c1, d1), weights, place, keys, v_cache, base + at[1], ahead)
            a2, b2, c2, d2 = _weighted_lane((a2, b2, c2, d2), weights, place, keys, v_cache, base + at[2], ahead)
            a3, b3, c3, d3 = _weighted_lane((a3, b3, c3, d3), weights, place, keys, v_cache, base + at[3], ahead)
    return (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3)


@njit(cache=True, nogil=True)
def _values(
    weights: Floats,
    start: int,
    lows: Int64,
    highs: Int64,
    v_cache: Kept,
    head: int,
    table: Int32,
    keys: Int32,
    lines: Int64,
    context: int,
    cold: bool,
    last: int,
    results: Floats,
) -> None:
    """Σ weight · value for the tile's queries, into the beginning of each of ``results`` [TILE, …].

    Query t has the keys ``keys[lines[t]]``, see ``_number_keys``; numbers below ``context`` are keys.
    """
    begin = min(max(lows[0], lows[1], lows[2], lows[3]), context)
    end = max(begin, min(highs[0], highs[1], highs[2], highs[3], context))
    width, stride = v_cache.shape[3], results.shape[1]
    k0, k1, k2, k3 = keys[lines[0]], keys[lines[1]], keys[lines[2]], keys[lines[3]]
    zero = const(0.0), const(0.0), const(0.0), const(0.0)
    for lane in range(0, width, 4 * LANES):
        # A head may end within the four vectors: its last vector is then computed more than once.
        l0, l1, l2, l3 = (
            lane,
            min(lane + LANES, width - LANES),
            min(lane + 2 * LANES, width - LANES),
            min(lane + 3 * LANES, width - LANES),
        )
        base = head * LANES * width
        at = base + l0, base + l1, base + l2, base + l3
        o0 = _weighted(zero, weights, 0, start, lows[0], min(begin, highs[0]), v_cache, table, at, k0, context)
        o1 = _weighted(zero, weights, 1, start, lows[1], min(begin, highs[1]), v_cache, table, at, k1, context)
        o2 = _weighted(zero, weights, 2, start, lows[2], min(begin, highs[2]), v_cache, table, at, k2, context)
        o3 = _weighted(zero, weights, 3, start, lows[3], min(begin, highs[3]), v_cache, table, at, k3, context)
        o0, o1, o2, o3 = _weighted_tile((o0, o1, o2, o3), weights, start, begin, end, v_cache, table, at, cold, last)
        o0 = _weighted(o0, weights, 0, start, max(end, lows[0]), highs[0], v_cache, table, at, k0, context)
        o1 = _weighted(o1, weights, 1, start, max(end, lows[1]), highs[1], v_cache, table, at, k1, context)
        o2 = _weighted(o2, weights, 2, start, max(end, lows[2]), highs[2], v_cache, table, at, k2, context)
        o3 = _weighted(o3, weights, 3, start, max(end, lows[3]), highs[3], v_cache, table, at, k3, context)
        _store4(results, l0, stride, (o0[0], o1[0], o2[0], o3[0]))
        _store4(results, l1, stride, (o0[1], o1[1], o2[1], o3[1]))
        _store4(results, l2, stride, (o0[2], o1[2], o2[2], o3[2]))
        _store4(results, l3, stride, (o0[3], o1[3], o2[3], o3[3]))


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def _clear(result: Floats, at: int, width: int) -> None:
    """The result over no keys."""
    for lane in range(0, width + LANES, LANES):
        store(result, at + lane, const(0.0))
    store(result, at + width + LANES, const(NOTHING))


@njit(cache=True, nogil=True)
def _put(out: Floats, target: int, head_dim: int, result: Floats, at: int, width: int) -> None:
    """Σ weight · value / Σ weight, 0 where no key was seen."""
    total = lane_sum(load(result, at + width))
    if total == 0.0:
        total = np.float32(1.0)
    for lane in range(0, head_dim, LANES):
        store_first(out, target + lane, load(result, at + lane) / splat(total), min(LANES, head_dim - lane))


@njit(cache=True, nogil=True, apart=True)
def _share(
    thread: int,
    threads: int,
    q: Floats,
    k_cache: Kept,
    v_cache: Kept,
    out: Floats,
    parts: Floats,
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
    """One thread's units of ``attend``: into ``out``, or block by block into ``parts`` if there are any."""
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads, width = k_cache.shape[1], v_cache.shape[3]
    group, stride = heads // kv_heads, width + 2 * LANES
    most_rows, most_vectors = 0, 0
    for sequence in range(context_lens.size):
        most_rows = max(most_rows, query_start[sequence + 1] - query_start[sequence])
    for number in range(bounds[thread], bounds[thread + 1]):
        _, first, end, _, _ = units[number // kv_heads]
        most_vectors = max(most_vectors, (end - first) * group)
    most_vectors = (most_vectors + TILE - 1) // TILE * TILE
    scores = np.empty((TILE, KEYS + (most_rows + LANES - 1) // LANES * LANES), np.float32)
    keys = np.empty((most_vectors // group + 1, most_rows), np.int32)
    queries = np.empty((most_vectors, head_dim), np.float32)
    wholes = np.empty(most_vectors * stride, np.float32)
    results = np.empty((TILE, stride), np.float32)
    lows, highs = np.empty((2, most_vectors), np.int64)
    starts, ends, lines = np.empty((3, TILE), np.int64)
    for number in range(bounds[thread], bounds[thread + 1]):
        sequence, first, end, first_block, end_block = units[number // kv_heads]
        head = number % kv_heads
        first_row, context, table = query_start[sequence], context_lens[sequence], block_tables[sequence]
        vectors = (end - first) * group
        padded = (vectors + TILE - 1) // TILE * TILE
        for row in range(first_row + first, first_row + end):
            low = max(hidden_keys, positions[row] - window + 1) if window else hidden_keys
            high = context + row - first_row + 1
            at = (row - first_row - first) * group
            if not chains[sequence]:
                line = keys[row - first_row - first]
                low, high = _number_keys(
                    line, min(low, context), context, row, first_row, slots, positions, ancestors, window
                )
            lows[at : at + group] = low
            highs[at : at + group] = high
            for i in range(group):
                for d in range(head_dim):
                    queries[at + i, d] = q[row, head * group + i, d] * np.float32(scale)
        # The last tile is filled up with the last query, whose result is then computed more than once.
        for vector in range(vectors, padded):
            copy_row(queries[vectors - 1], queries[vector])
            lows[vector], highs[vector] = lows[vectors - 1], highs[vectors - 1]
        for vector in range(vectors):
            _clear(wholes, vector * stride, width)
        limit = highs[vectors - 1] if chains[sequence] else context
        last_page = (context + end - 1) // LANES
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
                    _scores(
                        queries, tile, k_cache, head, table, start, first_page, end_page, tile == 0, last_page, scores
                    )
                for t in range(TILE):
                    if starts[t] < ends[t]:
                        for place in range(max(starts[t], limit), ends[t]):
                            scores[t, place - start] = scores[t, keys[lines[t], place - context] - start]
                        _softmax(scores, t, starts[t] - start, ends[t] - start, softcap, results, t * stride + width)
                if first_page < end_page:
                    _values(
                        scores,
                        start,
                        starts,
                        ends,
                        v_cache,
                        head,
                        table,
                        keys,
                        lines,
                        limit,
                        tile == 0,
                        last_page,
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
                _put(out, (row * heads + query_head) * head_dim, head_dim, wholes, vector * stride, width)


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
    work = (
        q,
        k_cache,
        v_cache,
        out,
        parts,
        units,
        bounds,
        kept,
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
    if kept.size:
        _join(parts, kept, out, q.shape[1], query_start, context_lens, width)


@cache
def load_bfloat16() -> None:
    """Makes ``write_kv`` and ``attend`` take caches in bfloat16; once a process, and before they are used."""
    compile_for(write_kv, _WRITE.format("u2"))
    compile_for(attend, _ATTEND.format("u2"))
