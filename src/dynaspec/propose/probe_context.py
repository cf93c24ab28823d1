"""Reading only the latest tokens of a request that the drafter has not followed, see ``SpecPlan.probe_context``.

They keep their positions and slots, but see nothing of what is before them. So the blocks before are left out of the
request's table. Blocks that others read as well may hold KV that is valid for them: those are left alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.contract.proposer import DecodeBatch, Ints
from dynaspec.kv.rows import RaggedRows
from dynaspec.kv.tables import BlockTables

Bools = npt.NDArray[np.bool_]


def probe_from(batch: DecodeBatch, drafting: Bools, seen: Ints, tables: BlockTables, tokens: int) -> Ints:
    """
    Args:
        drafting: [B]
        seen: [B] committed tokens that the drafter has read of each request.
        tokens: most to be read of those of which it lacks more; they begin with a block, so it may be fewer, or for
            less than a block, more.

    Returns:
        [B] tokens before the first that is read: of requests that are not read in part, those that have been.
    """
    size = tables.block_size
    start = np.minimum(-(-np.maximum(batch.lengths - tokens, 0) // size), (batch.lengths - 1) // size) * size
    found = seen.copy()
    for i in np.flatnonzero(drafting & (start > seen)).tolist():
        blocks = tables.blocks(int(batch.lanes[i]))[start[i] // size :]
        if not any(map(tables.pool.is_shared, blocks)):
            found[i] = start[i]
    return found


def leave_out(rows: RaggedRows, context: npt.NDArray[np.int32], apart: Bools, block_size: int) -> None:
    """Rows of requests that are read ``apart`` [A] from the text before them see nothing of it.

    Args:
        rows: of the requests, in their order. Changed in place, as is ``context``.
        context: [A] tokens before the first row of each, which begins a block.
    """
    tables = rows.block_tables
    for i in np.flatnonzero(apart).tolist():
        before = int(context[i]) // block_size
        tables[i, : tables.shape[1] - before] = tables[i, before:].copy()
        context[i] = 0
