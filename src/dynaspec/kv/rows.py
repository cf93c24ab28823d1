"""From runs of tokens to rows with positions and KV slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    query_start = np.zeros(len(lanes) + 1, dtype=np.int32)
    np.cumsum(count, out=query_start[1:])
    row_lanes = np.repeat(lanes, count)
    positions = np.arange(query_start[-1]) + np.repeat(start - query_start[:-1], count)
    block, offset = np.divmod(positions, block_size)
    slots = tables[row_lanes, block] * np.int64(block_size) + offset
    width = int((start + count - 1).max()) // block_size + 1
    return RaggedRows(query_start, row_lanes, positions, slots, tables[lanes, :width])
