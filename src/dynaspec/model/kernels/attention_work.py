"""How the work of paged attention on CPU is split over rows and threads."""

from __future__ import annotations

from math import gcd

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .attention_tile import TILE
from .paged_attention import KEYS, blocks_of

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

VECTORS = 48
"""Query vectors of a unit, at most, if so many fill tiles: their results and a block's keys and values stay in the
core's cache."""
SHARES = 4
"""Pieces for every thread, if the work can be split so far: so that all end at about the same time."""


@njit(
    "Tuple((i4[:, ::1], b1[::1], i8[::1], i8[::1]))(i4[::1], i4[::1], i8[::1], i8[::1], i8[::1], i8, i8, i8, i8)",
    cache=True,
    nogil=True,
)
def plan_work(
    query_start: Int32,
    context_lens: Int32,
    slots: Int64,
    positions: Int64,
    ancestors: Int64,
    heads: int,
    kv_heads: int,
    threads: int,
    team_work: int,
) -> tuple[Int32, npt.NDArray[np.bool_], Int64, Int64]:
    """Splits a pass into units of rows of one sequence, and these over the threads.

    A unit has many rows, so that what it reads of the cache serves many, and as many as fill tiles: a place that is
    empty takes as long as another. If that makes some too large to be shared equally, they are split by keys, and by
    rows where there are few keys.

    Args:
        query_start, context_lens, slots, positions: see ``ForwardBatch``.
        ancestors: the same; empty = −1 throughout.
        threads: to share the work, about equally.
        team_work: rows · keys from which more threads than one are faster.

    Returns:
        units [U, 5], chains [S], bounds and kept, all as ``paged_attention.attend`` wants them.
    """
    sequences = context_lens.size
    group = heads // kv_heads
    full = TILE // gcd(TILE, group)  # rows whose vectors leave no place in a tile empty
    most_rows = max(full, VECTORS // group // full * full)
    total, largest, longest = 0, 0, 0
    chains = np.empty(sequences, np.bool_)
    for s in range(sequences):
        begin, end = query_start[s], query_start[s + 1]
        keys = context_lens[s] + end - begin
        total += (end - begin) * keys
        largest = max(largest, min(end - begin, most_rows) * keys)
        longest = max(longest, keys)
        chains[s] = True
        for row in range(begin, end):
            branches = ancestors.size > 0 and ancestors[row] != -1
            if branches or slots[row] < 0 or positions[row] != context_lens[s] + row - begin:
                chains[s] = False
    if total < team_work:
        threads = 1
    pieces, spans = threads * SHARES, 1
    if threads > 1 and largest * pieces > total * kv_heads:
        spans = max(1, min(pieces, longest // KEYS))
    rows = query_start[sequences]
    unit_rows = min((max(1, rows * kv_heads * spans // pieces) + full - 1) // full * full, most_rows)
    count = 0
    for s in range(sequences):
        count += (query_start[s + 1] - query_start[s] + unit_rows - 1) // unit_rows
    units = np.empty((count * spans, 5), np.int32)
    cost = np.zeros(count * spans + 1, np.int64)  # cumulative, in tile · key
    kept = np.zeros(sequences + 1 if spans > 1 else 0, np.int64)
    unit = 0
    for s in range(sequences):
        own_rows = query_start[s + 1] - query_start[s]
        if spans > 1:
            kept[s + 1] = kept[s] + own_rows * heads * blocks_of(context_lens[s] + own_rows)
        for first in range(0, own_rows, unit_rows):
            stop = min(first + unit_rows, own_rows)
            keys = context_lens[s] + (stop if spans == 1 else own_rows)  # what is kept is there for all blocks
            for span in range(spans):
                begin, end = blocks_of(keys) * span // spans, blocks_of(keys) * (span + 1) // spans
                own = units[unit]
                own[0], own[1], own[2], own[3], own[4] = s, first, stop, begin, end
                tiles = ((stop - first) * group + TILE - 1) // TILE
                cost[unit + 1] = cost[unit] + tiles * (min(end * KEYS, keys) - begin * KEYS)
                unit += 1
    bounds = np.empty(threads + 1, np.int64)
    bounds[0], bounds[threads] = 0, count * spans * kv_heads
    unit = 0
    for thread in range(1, threads):
        share = cost[count * spans] * kv_heads * thread // threads
        while cost[unit + 1] * kv_heads <= share:
            unit += 1
        own_cost = cost[unit + 1] - cost[unit]
        bounds[thread] = unit * kv_heads + (share - cost[unit] * kv_heads + own_cost // 2) // own_cost
    return units, chains, bounds, kept
