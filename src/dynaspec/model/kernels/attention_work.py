"""How the work of paged attention on CPU is split over rows and threads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .paged_attention import KEYS, TILE

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

VECTORS = 48
"""Query vectors of a unit, at most: their results and a block's keys and values stay in the core's cache."""
SHARES = 4
"""Units for every thread, if there are enough rows: so that they end at about the same time."""


@njit(
    "Tuple((i4[:, ::1], b1[::1], i8[::1], i8))(i4[::1], i4[::1], i8[::1], i8[::1], i8[::1], i8, i8, i8, i8)",
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
) -> tuple[Int32, npt.NDArray[np.bool_], Int64, int]:
    """Splits a pass into units of rows of one sequence, and these over the threads.

    A unit has many rows, so that what it reads of the cache serves many, but there are several for every thread if
    there are enough rows. If there are few rows, units have some of the keys only.

    Args:
        query_start, context_lens, slots, positions: see ``ForwardBatch``.
        ancestors: the same; empty = −1 throughout.
        threads: to share the work, about equally.
        team_work: rows · keys from which more threads than one are faster.

    Returns:
        units [U, 5], chains [S], bounds and kept, all as ``paged_attention.attend`` wants them.
    """
    sequences = context_lens.size
    total, longest = 0, 0
    chains = np.empty(sequences, np.bool_)
    for s in range(sequences):
        begin, end = query_start[s], query_start[s + 1]
        total += (end - begin) * (context_lens[s] + end - begin)
        longest = max(longest, context_lens[s] + end - begin)
        chains[s] = True
        for row in range(begin, end):
            branches = ancestors.size > 0 and ancestors[row] != -1
            if branches or slots[row] < 0 or positions[row] != context_lens[s] + row - begin:
                chains[s] = False
    if total < team_work:
        threads = 1
    rows = query_start[sequences]
    tile_rows, most_rows = max(1, TILE * kv_heads // heads), max(1, VECTORS * kv_heads // heads)
    unit_rows = min(max(tile_rows, rows * kv_heads // (threads * SHARES)), most_rows)
    count = 0
    for s in range(sequences):
        count += (query_start[s + 1] - query_start[s] + unit_rows - 1) // unit_rows
    blocks, spans = (longest + KEYS - 1) // KEYS, 1
    if threads > 1 and count * kv_heads < threads * SHARES:
        spans = min(threads, blocks)
    units = np.empty((count * spans, 5), np.int32)
    cost = np.zeros(count * spans + 1, np.int64)  # cumulative, in row · block
    unit = 0
    for s in range(sequences):
        own_rows = query_start[s + 1] - query_start[s]
        for first in range(0, own_rows, unit_rows):
            stop = min(first + unit_rows, own_rows)
            # Results that are merged at the end are there for all blocks of the sequence.
            own_blocks = (context_lens[s] + (stop if spans == 1 else own_rows) + KEYS - 1) // KEYS
            for span in range(spans):
                begin, end = own_blocks * span // spans, own_blocks * (span + 1) // spans
                units[unit] = (s, first, stop, begin, end)
                cost[unit + 1] = cost[unit] + (stop - first) * (end - begin)
                unit += 1
    bounds = np.empty(threads + 1, np.int64)
    bounds[0], bounds[threads] = 0, count * spans * kv_heads
    unit = 0
    for thread in range(1, threads):
        share = cost[count * spans] * kv_heads * thread // threads
        while cost[unit + 1] * kv_heads <= share:
            unit += 1
        bounds[thread] = unit * kv_heads + (share - cost[unit] * kv_heads) // (cost[unit + 1] - cost[unit])
    return units, chains, bounds, blocks if spans > 1 else 0
