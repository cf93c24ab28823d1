"""From runs of tokens to rows with positions and KV slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import copy_row, njit

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class RaggedRows:
    """Rows of S runs of consecutive tokens, R in all."""

    query_start: Int32
    """[S + 1]"""
    lanes: Int64
    """[R]"""
    positions: Int64
    """[R]"""
    slots: Int64
    """[R] block · block size + offset."""
    block_tables: Int32
    """[S, blocks that any of the runs reads or writes]"""


def ragged_rows(tables: Int32, block_size: int, lanes: Int64, start: Int64, count: Int64) -> RaggedRows:
    """Rows for tokens ``start`` … ``start + count − 1`` of each lane.

    Args:
        tables: [lanes, max blocks] of all lanes.
        lanes, start, count: [S], ``count`` ≥ 1.
    """
    return RaggedRows(*fill_rows(tables, block_size, lanes, start, count))


@njit(
    "Tuple((i4[::1], i8[::1], i8[::1], i8[::1], i4[:, ::1]))(i4[:, ::1], i8, i8[::1], i8[::1], i8[::1])",
    cache=True,
    nogil=True,
)
def fill_rows(
    tables: Int32, block_size: int, lanes: Int64, start: Int64, count: Int64
) -> tuple[Int32, Int64, Int64, Int64, Int32]:
    """The fields of ``ragged_rows``, which see; for kernels."""
    query_start = np.zeros(lanes.size + 1, np.int32)
    width = 0
    for s in range(lanes.size):
        query_start[s + 1] = query_start[s] + count[s]
        width = max(width, (start[s] + count[s] - 1) // block_size + 1)
    total = query_start[-1]
    row_lanes, positions, slots = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    blocks = np.empty((lanes.size, width), np.int32)
    for s in range(lanes.size):
        table = tables[lanes[s]]
        copy_row(table[:width], blocks[s])
        for i in range(count[s]):
            row, position = query_start[s] + i, start[s] + i
            row_lanes[row], positions[row] = lanes[s], position
            slots[row] = np.int64(table[position // block_size]) * block_size + position % block_size
    return query_start, row_lanes, positions, slots, blocks


@njit(cache=True, nogil=True)
def tokens_at(texts: Int32, lanes: Int64, positions: Int64) -> Int64:
    """[R] tokens of rows, out of the texts [lanes, max length] of all lanes; for kernels."""
    tokens = np.empty(lanes.size, np.int64)
    for i in range(tokens.size):
        tokens[i] = texts[lanes[i], positions[i]]
    return tokens
