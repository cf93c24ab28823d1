"""How the work of paged attention on CPU is split over rows and threads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .paged_attention import TILE

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


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
    """Splits a pass into units of few rows of one sequence, as many as fill a tile, and these over the threads.

    Args:
        query_start, context_lens, slots, positions: see ``ForwardBatch``.
        ancestors: the same; empty = −1 throughout.
        threads: to share the work, about equally.
        team_work: rows · keys from which more threads than one are faster.

    Returns:
        units [U, 3], chains [S], bounds and longest, all as ``paged_attention.attend`` wants them.
    """
    sequences = context_lens.size
    unit_rows = max(1, TILE * kv_heads // heads)
    count, longest = 0, 0
    for s in range(sequences):
        count += (query_start[s + 1] - query_start[s] + unit_rows - 1) // unit_rows
        longest = max(longest, context_lens[s] + query_start[s + 1] - query_start[s])
    units = np.empty((count, 3), np.int32)
    chains = np.empty(sequences, np.bool_)
    cost = np.zeros(count + 1, np.int64)  # cumulative, in row · key
    unit = 0
    for s in range(sequences):
        begin, end = query_start[s], query_start[s + 1]
        chains[s] = True
        for row in range(begin, end):
            branches = ancestors.size > 0 and ancestors[row] != -1
            if branches or slots[row] < 0 or positions[row] != context_lens[s] + row - begin:
                chains[s] = False
        for first in range(0, end - begin, unit_rows):
            stop = min(first + unit_rows, end - begin)
            units[unit] = (s, first, stop)
            cost[unit + 1] = cost[unit] + (stop - first) * (context_lens[s] + stop)
            unit += 1
    if cost[count] < team_work:
        threads = 1
    bounds = np.empty(threads + 1, np.int64)
    bounds[0], bounds[threads] = 0, count * kv_heads
    unit = 0
    for thread in range(1, threads):
        share = cost[count] * kv_heads * thread // threads
        while cost[unit + 1] * kv_heads <= share:
            unit += 1
        bounds[thread] = unit * kv_heads + (share - cost[unit] * kv_heads) // (cost[unit + 1] - cost[unit])
    return units, chains, bounds, longest
