"""A whole draft of an EAGLE-3 head on CPU in one compiled call; as ``chain``, with hidden states going along."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.contract.proposer import Ints
from dynaspec.kv.rows import fill_rows
from dynaspec.model.eagle3.compiled import CompiledHead
from dynaspec.model.kernels.eagle3 import fuse, head_logits, head_pass
from dynaspec.sampling.compiled import kernel

from .first_choice import Choices, take_first
from .unread import unread_rows

Int32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@kernel
def draft_chain(
    head: CompiledHead,
    states: Floats,
    caches: Ints,
    blocks: int,
    tables: Int32,
    block_size: int,
    read: Ints,
    most: int,
    choices: Choices,
) -> tuple[Ints, Ints, Ints]:
    """See ``chain.draft_chain``.

    Args:
        states: [KV slots, …] the target's, see ``taps.Taps.arena``.
    """
    lanes, context, end, tokens, fields = unread_rows(
        choices.texts, tables, block_size, choices.lanes, choices.lengths, read, choices.requests, most
    )
    query_start, row_lanes, positions, slots, block_tables = fields
    known = np.empty((tokens.size, states.shape[1]), np.float32)
    for row in range(tokens.size):
        before = positions[row] - 1
        known[row] = states[np.int64(tables[row_lanes[row], before // block_size]) * block_size + before % block_size]
    every = head_pass(
        head, caches, blocks, tokens, fuse(head, known), query_start, context, block_tables, slots, positions
    )
    running, width = np.arange(lanes.size), every.shape[1]
    hidden = np.empty((lanes.size, width), np.float32)
    for i in range(lanes.size):
        hidden[i] = every[query_start[i + 1] - 1]
    processed, longest = np.zeros_like(lanes), choices.tokens.shape[1]
    rows = np.empty(longest + 1, np.int64)
    rows[0] = slots.size
    for done in range(1, longest + 1):
        going_on = take_first(head_logits(head, hidden), running, done, choices)
        if not going_on.size:
            return rows[:done], end, processed
        places = choices.requests[going_on]
        start, drafted = choices.lengths[places] + (done - 1), np.empty(going_on.size, np.int64)
        carried, at = np.empty((going_on.size, width), np.float32), 0
        for i in range(going_on.size):
            while running[at] != going_on[i]:
                at += 1
            carried[i] = hidden[at]
            drafted[i] = choices.tokens[places[i], done - 1]
        running = going_on
        query_start, _, positions, slots, block_tables = fill_rows(
            tables, block_size, lanes[running], start, np.ones_like(start)
        )
        seen = start.astype(np.int32)
        hidden = head_pass(head, caches, blocks, drafted, carried, query_start, seen, block_tables, slots, positions)
        processed[running] = done
        rows[done] = running.size
    return rows, end, processed
