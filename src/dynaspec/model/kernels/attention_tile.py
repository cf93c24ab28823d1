"""Attention of a tile, four query vectors that share a KV head, to the keys of a block: all that is computed there.

What a key is loaded for serves four vectors. While keys are multiplied, their values are fetched, and with the values
keys that are read next: pages lie too far apart for the processor to do that by itself. See ``paged_attention``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .functions import exp, tanh
from .simd import (
    HAS_AVX512,
    LANES,
    const,
    fetch,
    fma,
    has_dot,
    lane_max,
    load,
    load_factors,
    load_first,
    load_row,
    load_two_rows,
    maximum,
    multiply_add,
    pairs,
    rounded_for,
    splat,
    splat_at,
    store,
)

Floats = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Kept = npt.NDArray[Any]
"""Of a cache: float32, or bfloat16 as uint16."""

TILE = 4
"""Query vectors worked on at a time."""
_PAGES = 2 if HAS_AVX512 else 1
"""Pages whose keys are worked on at a time."""


@njit(cache=True, nogil=True, allocates=False)
def put_query(query: Floats, scale: float, cache: Kept, out: Floats) -> None:
    """A query [head_dim], times a scale, as ``multiply_keys`` takes it: rounded as ``cache`` is, two numbers in a word
    where that ``has_dot``, and with zeros behind."""
    head_dim = query.size
    for lane in range(0, head_dim, 2 * LANES):
        first = load_first(query, lane, head_dim - lane) * const(scale)
        second = load_first(query, lane + LANES, head_dim - lane - LANES) * const(scale)
        if has_dot(cache):
            store(out, lane // 2, pairs(first, second))
        else:
            store(out, lane, rounded_for(cache, first))
            store(out, lane + LANES, rounded_for(cache, second))


@njit(cache=True, nogil=True, allocates=False)
def multiply_keys(
    queries: Floats,
    vector: int,
    k_cache: Kept,
    head: int,
    table: Int32,
    start: int,
    first: int,
    end: int,
    v_cache: Kept,
    fetch_values: bool,
    scores: Floats,
) -> None:
    """Dot products of the queries ``vector`` … ``vector`` + 3 with all keys of the pages first … end − 1.

    ``scores`` [TILE, …] begins with key ``start``. If ``fetch_values``, the pages' values are fetched meanwhile.
    """
    heads, head_dim = k_cache.shape[1], k_cache.shape[2]
    width, size, stride = scores.shape[1], head_dim * LANES, queries.shape[1]
    begin, v_size = vector * stride, LANES * v_cache.shape[3]
    for page in range(first, end, _PAGES):
        # Eight sums that do not wait for each other: of two pages, or of one where they take two registers each.
        after = min(page + 1, end - 1)
        here, there = table[page] * heads + head, table[after] * heads + head
        k0, k1, v0, v1 = here * size, there * size, here * v_size, there * v_size
        a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = const(0.0)
        if has_dot(k_cache):
            for i in range(head_dim // 2):
                q0, q1 = splat_at(queries, begin + i), splat_at(queries, begin + i + stride)
                q2, q3 = splat_at(queries, begin + i + 2 * stride), splat_at(queries, begin + i + 3 * stride)
                key = load_factors(k_cache, k0, 2 * i, 0, LANES)
                a0, b0 = multiply_add(k_cache, q0, key, a0), multiply_add(k_cache, q1, key, b0)
                c0, d0 = multiply_add(k_cache, q2, key, c0), multiply_add(k_cache, q3, key, d0)
                key = load_factors(k_cache, k1, 2 * i, 0, LANES)
                a1, b1 = multiply_add(k_cache, q0, key, a1), multiply_add(k_cache, q1, key, b1)
                c1, d1 = multiply_add(k_cache, q2, key, c1), multiply_add(k_cache, q3, key, d1)
                if fetch_values:
                    fetch(v_cache, v0 + i * 2 * LANES)
                    fetch(v_cache, v1 + i * 2 * LANES)
        else:
            for d in range(0, head_dim, 2):
                key, after_key = load_two_rows(k_cache, k0, d, 0, LANES)
                other, after_other = key, after_key
                if _PAGES == 2:
                    other, after_other = load_two_rows(k_cache, k1, d, 0, LANES)
                if fetch_values:
                    fetch(v_cache, v0 + d * LANES)
                    fetch(v_cache, v0 + (d + 1) * LANES)
                    if _PAGES == 2:
                        fetch(v_cache, v1 + d * LANES)
                        fetch(v_cache, v1 + (d + 1) * LANES)
                at = begin + d
                q0, q1 = splat_at(queries, at), splat_at(queries, at + stride)
                q2, q3 = splat_at(queries, at + 2 * stride), splat_at(queries, at + 3 * stride)
                a0, b0, c0, d0 = fma(q0, key, a0), fma(q1, key, b0), fma(q2, key, c0), fma(q3, key, d0)
                if _PAGES == 2:
                    a1, b1, c1, d1 = fma(q0, other, a1), fma(q1, other, b1), fma(q2, other, c1), fma(q3, other, d1)
                q0, q1 = splat_at(queries, at + 1), splat_at(queries, at + 1 + stride)
                q2, q3 = splat_at(queries, at + 1 + 2 * stride), splat_at(queries, at + 1 + 3 * stride)
                key, other = after_key, after_other
                a0, b0, c0, d0 = fma(q0, key, a0), fma(q1, key, b0), fma(q2, key, c0), fma(q3, key, d0)
                if _PAGES == 2:
                    a1, b1, c1, d1 = fma(q0, other, a1), fma(q1, other, b1), fma(q2, other, c1), fma(q3, other, d1)
        _store4(scores, page * LANES - start, width, (a0, b0, c0, d0))
        if _PAGES == 2:
            _store4(scores, after * LANES - start, width, (a1, b1, c1, d1))


@njit(cache=True, nogil=True, allocates=False)
def _store4(out: Floats, at: int, stride: int, vectors: Any) -> None:
    """Writes four vectors, ``stride`` apart."""
    store(out, at, vectors[0])
    store(out, at + stride, vectors[1])
    store(out, at + 2 * stride, vectors[2])
    store(out, at + 3 * stride, vectors[3])


@njit(cache=True, nogil=True, allocates=False)
def softmax(
    scores: Floats,
    t: int,
    low: int,
    high: int,
    softcap: float,
    cache: Kept,
    weight_pairs: Floats,
    result: Floats,
    at: int,
) -> None:
    """scores[t, low:high], which are some → exp(score − peak) in place; their sum and the peak go to ``result``.

    Works on whole vectors: what lies around the range inside them becomes 0. Weights are rounded as ``cache`` is; where
    that ``has_dot``, those in ``weight_pairs`` [t] are, two in a word.
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
        total = total + weight
        store(scores, place, weight if has_dot(cache) else rounded_for(cache, weight))
    if has_dot(cache):
        for place in range(begin // (2 * LANES) * 2 * LANES, end, 2 * LANES):
            both = pairs(load(scores, base + place), load(scores, base + place + LANES))
            store(weight_pairs, t * weight_pairs.shape[1] + place // 2, both)
    store(result, at, total)
    store(result, at + LANES, peak)


@njit(cache=True, nogil=True, allocates=False)
def _weighted(
    totals: Any,
    t: int,
    low: int,
    high: int,
    keys: Int32,
    weights: Floats,
    start: int,
    v_cache: Kept,
    head: int,
    table: Int32,
    at: Any,
    context: int,
) -> Any:
    """totals + Σ weight · value over the keys numbered low … high − 1 of query ``t``.

    Four vectors of 16 dimensions, which begin with those of ``at``. Numbers below ``context`` are keys.
    """
    o0, o1, o2, o3 = totals
    width = v_cache.shape[3]
    size = LANES * width
    for number in range(low, high):
        key = number if number < context else keys[number - context]
        base, row = (table[key // LANES] * v_cache.shape[1] + head) * size, key % LANES
        weight = rounded_for(v_cache, splat(weights[t, number - start]))
        v0, v1 = load_row(v_cache, base, row, at[0], width), load_row(v_cache, base, row, at[1], width)
        v2, v3 = load_row(v_cache, base, row, at[2], width), load_row(v_cache, base, row, at[3], width)
        # As words of two numbers these are a number and 0.
        o0, o1 = multiply_add(v_cache, weight, v0, o0), multiply_add(v_cache, weight, v1, o1)
        o2, o3 = multiply_add(v_cache, weight, v2, o2), multiply_add(v_cache, weight, v3, o3)
    return o0, o1, o2, o3


@njit(cache=True, nogil=True, allocates=False)
def _add_two_rows(totals: Any, weights: Floats, here: int, v_cache: Kept, base: int, row: int, at: int) -> Any:
    """See ``_weighted_lane``: two rows, whose weights begin at ``here``."""
    a, b, c, d = totals
    width, stride = v_cache.shape[3], weights.shape[1]
    value, after = load_two_rows(v_cache, base, row, at, width)
    a, b = fma(splat_at(weights, here), value, a), fma(splat_at(weights, here + stride), value, b)
    c = fma(splat_at(weights, here + 2 * stride), value, c)
    d = fma(splat_at(weights, here + 3 * stride), value, d)
    a, b = fma(splat_at(weights, here + 1), after, a), fma(splat_at(weights, here + 1 + stride), after, b)
    c = fma(splat_at(weights, here + 1 + 2 * stride), after, c)
    d = fma(splat_at(weights, here + 1 + 3 * stride), after, d)
    return a, b, c, d


@njit(cache=True, nogil=True, allocates=False)
def _weighted_lane(
    totals: Any,
    weights: Floats,
    place: int,
    v_cache: Kept,
    base: int,
    begin: int,
    end: int,
    k_cache: Kept,
    ahead: int,
    at: int,
) -> Any:
    """totals + Σ weight · value for four queries and 16 dimensions from ``at`` on, over rows of one page, from an even
    number to another.

    The weights begin at ``place``, the page at ``base``. Keys from ``ahead`` on are fetched, if that is not negative.
    """
    if ahead < 0:
        for row in range(begin, end, 2):
            totals = _add_two_rows(totals, weights, place + row - begin, v_cache, base, row, at)
    else:
        for row in range(begin, end, 2):
            fetch(k_cache, ahead + row * 4 * LANES)
            fetch(k_cache, ahead + (row + 1) * 4 * LANES)
            totals = _add_two_rows(totals, weights, place + row - begin, v_cache, base, row, at)
    return totals


@njit(cache=True, nogil=True, allocates=False)
def _add_factors(totals: Any, weight: Any, values: Any, cache: Kept) -> Any:
    """Four vectors of totals + weight · value."""
    o0, o1, o2, o3 = totals
    v0, v1, v2, v3 = values
    o0, o1 = multiply_add(cache, weight, v0, o0), multiply_add(cache, weight, v1, o1)
    return o0, o1, multiply_add(cache, weight, v2, o2), multiply_add(cache, weight, v3, o3)


@njit(cache=True, nogil=True, allocates=False)
def _weighted_tile(
    totals: Any,
    weights: Floats,
    weight_pairs: Floats,
    start: int,
    low: int,
    high: int,
    v_cache: Kept,
    head: int,
    table: Int32,
    at: Any,
    k_cache: Kept,
    next_keys: Int64,
) -> Any:
    """The same for all four queries at once, over keys that all of them see, from an even number to another.

    Meanwhile the keys ``next_keys`` are fetched, of a page with each page, as page · kv heads + head; −1 = none.
    """
    a, b, c, d = totals
    width = v_cache.shape[3]
    size = LANES * width
    factors, rows = (weight_pairs, 2) if has_dot(v_cache) else (weights, 1)
    stride = factors.shape[1]
    for page in range(low // LANES, (high + LANES - 1) // LANES):
        begin, end = max(low - page * LANES, 0), min(high - page * LANES, LANES)
        base, place = (table[page] * v_cache.shape[1] + head) * size, page * LANES - start
        ahead = next_keys[page - low // LANES]
        if ahead >= 0:
            ahead = ahead * k_cache.shape[2] * LANES + at[0] * LANES
        if HAS_AVX512:
            for row in range(begin, end, rows):
                here, line = (place + row) // rows, ahead + row * 4 * LANES
                if ahead >= 0:
                    fetch(k_cache, line)
                    fetch(k_cache, line + rows * LANES)
                    fetch(k_cache, line + rows * 2 * LANES)
                    fetch(k_cache, line + rows * 3 * LANES)
                values = (
                    load_factors(v_cache, base, row, at[0], width),
                    load_factors(v_cache, base, row, at[1], width),
                    load_factors(v_cache, base, row, at[2], width),
                    load_factors(v_cache, base, row, at[3], width),
                )
                a = _add_factors(a, splat_at(factors, here), values, v_cache)
                b = _add_factors(b, splat_at(factors, here + stride), values, v_cache)
                c = _add_factors(c, splat_at(factors, here + 2 * stride), values, v_cache)
                d = _add_factors(d, splat_at(factors, here + 3 * stride), values, v_cache)
        else:  # registers have room for the sums of 16 dimensions
            page_of = weights, place + begin, v_cache, base, begin, end, k_cache
            step = LANES if ahead >= 0 else 0
            (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3) = a, b, c, d
            a0, b0, c0, d0 = _weighted_lane((a0, b0, c0, d0), *page_of, ahead, at[0])
            a1, b1, c1, d1 = _weighted_lane((a1, b1, c1, d1), *page_of, ahead + step, at[1])
            a2, b2, c2, d2 = _weighted_lane((a2, b2, c2, d2), *page_of, ahead + 2 * step, at[2])
            a3, b3, c3, d3 = _weighted_lane((a3, b3, c3, d3), *page_of, ahead + 3 * step, at[3])
            a, b, c, d = (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3)
    return a, b, c, d


@njit(cache=True, nogil=True, allocates=False)
def weigh_values(
    weights: Floats,
    weight_pairs: Floats,
    start: int,
    lows: Int64,
    highs: Int64,
    v_cache: Kept,
    head: int,
    table: Int32,
    keys: Int32,
    lines: Int64,
    context: int,
    k_cache: Kept,
    next_keys: Int64,
    results: Floats,
) -> None:
    """Σ weight · value for the tile's queries, into the beginning of each of ``results`` [TILE, …].

    Query t has the keys ``keys[lines[t]]``, numbered from ``context`` on; numbers below are keys. For ``next_keys``
    see ``_weighted_tile``.
    """
    begin = min(max(lows[0], lows[1], lows[2], lows[3]), context)
    begin += begin % 2
    end = max(begin, min(highs[0], highs[1], highs[2], highs[3], context) // 2 * 2)
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
        at = l0, l1, l2, l3
        o0 = o1 = o2 = o3 = zero
        edges = weights, start, v_cache, head, table, at, context
        if lows[0] < begin:
            o0 = _weighted(o0, 0, lows[0], min(begin, highs[0]), k0, *edges)
        if lows[1] < begin:
            o1 = _weighted(o1, 1, lows[1], min(begin, highs[1]), k1, *edges)
        if lows[2] < begin:
            o2 = _weighted(o2, 2, lows[2], min(begin, highs[2]), k2, *edges)
        if lows[3] < begin:
            o3 = _weighted(o3, 3, lows[3], min(begin, highs[3]), k3, *edges)
        o0, o1, o2, o3 = _weighted_tile(
            (o0, o1, o2, o3), weights, weight_pairs, start, begin, end, v_cache, head, table, at, k_cache, next_keys
        )
        if end < highs[0]:
            o0 = _weighted(o0, 0, max(end, lows[0]), highs[0], k0, *edges)
        if end < highs[1]:
            o1 = _weighted(o1, 1, max(end, lows[1]), highs[1], k1, *edges)
        if end < highs[2]:
            o2 = _weighted(o2, 2, max(end, lows[2]), highs[2], k2, *edges)
        if end < highs[3]:
            o3 = _weighted(o3, 3, max(end, lows[3]), highs[3], k3, *edges)
        _store4(results, l0, stride, (o0[0], o1[0], o2[0], o3[0]))
        _store4(results, l1, stride, (o0[1], o1[1], o2[1], o3[1]))
        _store4(results, l2, stride, (o0[2], o1[2], o2[2], o3[2]))
        _store4(results, l3, stride, (o0[3], o1[3], o2[3], o3[3]))
