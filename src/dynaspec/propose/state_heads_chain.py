"""A whole draft of heads on CPU in one compiled call; see ``chain``, which is the same for models with KV."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.contract.proposer import Ints
from dynaspec.model.kernels.state_heads import medusa_logits, mlp_begin, mlp_logits, mlp_step
from dynaspec.model.state_heads.compiled import CompiledHeads, CompiledMedusa, CompiledMlp
from dynaspec.sampling.compiled import kernel

from .first_choice import Choices, take_first
from .state_heads import Chain
from .unread import rows_at, slots_before
from .warm_up import nobody

Int32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def chain_of(heads: CompiledHeads, states: Floats) -> Chain:
    """Drafts from ``states`` [KV slots, width], the target's. Compiled, or loaded, here: else the first draft would
    take seconds."""
    medusa = heads if isinstance(heads, CompiledMedusa) else None
    mlp = heads if isinstance(heads, CompiledMlp) else None

    def chain(tables: Int32, block_size: int, choices: Choices) -> Ints:
        return draft_heads(medusa, mlp, states, tables, block_size, choices)

    _, _, tables, block_size, *_, choices = nobody()
    chain(tables, block_size, choices)
    return chain


@kernel
def draft_heads(
    medusa: CompiledMedusa | None,
    mlp: CompiledMlp | None,
    states: Floats,
    tables: Int32,
    block_size: int,
    choices: Choices,
) -> Ints:
    """Drafts for ``Choices.requests``.

    Args:
        medusa, mlp: one of them; numba compiles no branch for the other.
        states: see ``chain_of``.
        tables: [lanes, max blocks] of all lanes.

    Returns:
        Rows that each head ran over.
    """
    lanes, lengths = choices.lanes[choices.requests], choices.lengths[choices.requests]
    state = rows_at(states, slots_before(tables, block_size, lanes, lengths - 1))
    tokens = np.empty(lanes.size, np.int64)
    for i in range(lanes.size):
        tokens[i] = choices.texts[lanes[i], lengths[i] - 1]
    if mlp is not None:
        state = mlp_begin(mlp, state)
    running, longest, scores = np.arange(lanes.size), choices.tokens.shape[1], np.empty((0, 0), np.float32)
    rows = np.empty(longest, np.int64)
    for done in range(1, longest + 1):
        rows[done - 1] = running.size
        if mlp is not None:
            state = mlp_step(mlp, done - 1, state, tokens)
            scores = mlp_logits(mlp, done - 1, state)
        if medusa is not None:
            scores = medusa_logits(medusa, done - 1, state)
        ran, running = running, take_first(scores, running, done, choices)
        if not running.size:
            return rows[:done]
        state, tokens = rows_at(state, np.searchsorted(ran, running)), np.empty(running.size, np.int64)
        for i in range(running.size):
            tokens[i] = choices.tokens[choices.requests[running[i]], done - 1]
    return rows
