"""A whole draft on CPU in one compiled call: reading what the drafter lacks, all passes, and the rule that ends them.

Between two passes of a small drafter the host would take as long as a pass: its code and data are not in the caches,
which hold what the passes have left there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.contract.proposer import Ints
from dynaspec.kv.rows import fill_rows
from dynaspec.model.compiled import CompiledDecoder
from dynaspec.model.kernels.decode import decode, logits
from dynaspec.sampling.compiled import kernel

from .first_choice import Choices, take_first
from .unread import unread_rows

Int32 = npt.NDArray[np.int32]


@kernel
def draft_chain(
    model: CompiledDecoder,
    caches: Ints,
    blocks: int,
    tables: Int32,
    block_size: int,
    read: Ints,
    most: int,
    choices: Choices,
) -> tuple[Ints, Ints, Ints]:
    """Drafts for ``Choices.requests`` [A], of which none lacks more than it may read at once.

    Args:
        caches: see ``model.compiled.CacheAddresses``; of so many ``blocks``.
        tables, block_size, read, most: see ``unread_rows``.

    Returns:
        Rows of each pass; committed tokens that the drafter has read of each request [A]; draft tokens processed of
        each [A].
    """
    lanes, context, end, tokens, fields = unread_rows(
        choices.texts, tables, block_size, choices.lanes, choices.lengths, read, choices.requests, most
    )
    query_start, _, positions, slots, block_tables = fields
    none, nowhere = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    every = decode(model, none, nowhere, caches, blocks, tokens, query_start, context, block_tables, slots, positions)
    running, width = np.arange(lanes.size), every.shape[1]
    hidden = np.empty((lanes.size, width), np.float32)
    for i in range(lanes.size):
        hidden[i] = every[query_start[i + 1] - 1]
    processed, longest = np.zeros_like(lanes), choices.tokens.shape[1]
    rows = np.empty(longest + 1, np.int64)
    rows[0] = slots.size
    for done in range(1, longest + 1):
        running = take_first(logits(model, hidden), running, done, choices)
        if not running.size:
            return rows[:done], end, processed
        places = choices.requests[running]
        start, drafted = choices.lengths[places] + (done - 1), np.empty(running.size, np.int64)
        for i in range(running.size):
            drafted[i] = choices.tokens[places[i], done - 1]
        query_start, _, positions, slots, block_tables = fill_rows(
            tables, block_size, lanes[running], start, np.ones_like(start)
        )
        seen = start.astype(np.int32)
        hidden = decode(
            model, none, nowhere, caches, blocks, drafted, query_start, seen, block_tables, slots, positions
        )
        processed[running] = done
        rows[done] = running.size
    return rows, end, processed
