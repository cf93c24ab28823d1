"""A whole draft of heads on CPU in one compiled call; see ``chain``, which is the same for models with KV."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import Ints
from dynaspec.model.kernels.state_heads import medusa_logits, mlp_begin, mlp_logits, mlp_step
from dynaspec.model.state_heads.compiled import CompiledHeads, CompiledMedusa, CompiledMlp

from .first_choice import Choices, take_first
from .growth import Growth, add_best, next_parents, rows_above, tokens_of
from .state_heads import Chain, Tree
from .warm_up import no_growth, nobody
from .watermark import rows_at, slots_before

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


def tree_of(heads: CompiledHeads, states: Floats) -> Tree:
    """The same for trees."""
    medusa = heads if isinstance(heads, CompiledMedusa) else None
    mlp = heads if isinstance(heads, CompiledMlp) else None

    def tree(tables: Int32, block_size: int, known: Ints, growth: Growth) -> Ints:
        return draft_tree(medusa, mlp, states, tables, block_size, known, growth)

    tables, block_size, *_, known, growth = no_growth()
    tree(tables, block_size, known, growth)
    return tree


@kernel
def _run(
    medusa: CompiledMedusa | None, mlp: CompiledMlp | None, head: int, state: Floats, tokens: Ints
) -> tuple[Floats, Floats]:
    """The state that a head leaves [R, …], and its logits [R, V]."""
    scores = np.empty((0, 0), np.float32)
    if mlp is not None:
        state = mlp_step(mlp, head, state, tokens)
        scores = mlp_logits(mlp, head, state)
    if medusa is not None:
        scores = medusa_logits(medusa, head, state)
    return state, scores


@kernel
def draft_tree(
    medusa: CompiledMedusa | None,
    mlp: CompiledMlp | None,
    states: Floats,
    tables: Int32,
    block_size: int,
    known: Ints,
    growth: Growth,
) -> Ints:
    """Grows trees.

    Args:
        medusa … tables: see ``draft_heads``.
        known: [V] the target's ids of the tokens that logits are about; empty = all, in their order.
        growth: trees without nodes.

    Returns:
        Rows that each head ran over.
    """
    state = rows_at(states, slots_before(tables, block_size, growth.lanes, growth.lengths - 1))
    if mlp is not None:
        state = mlp_begin(mlp, state)
    longest = growth.depth.max() if growth.depth.size else 0
    rows, who, above = np.empty(longest, np.int64), np.arange(growth.made.size), np.full(growth.made.size, -1, np.int64)
    for done in range(1, longest + 1):
        rows[done - 1] = who.size
        state, scores = _run(medusa, mlp, done - 1, state, tokens_of(growth, who, above))
        add_best(growth, who, above, scores, known)
        before_who, before_above = who, above
        who, above = next_parents(growth, done)
        if not who.size:
            return rows[:done]
        state = rows_at(state, rows_above(growth, who, above, before_who, before_above))
    return rows


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
    running, longest = np.arange(lanes.size), choices.tokens.shape[1]
    rows = np.empty(longest, np.int64)
    for done in range(1, longest + 1):
        rows[done - 1] = running.size
        state, scores = _run(medusa, mlp, done - 1, state, tokens)
        ran, running = running, take_first(scores, running, done, choices)
        if not running.size:
            return rows[:done]
        state, tokens = rows_at(state, np.searchsorted(ran, running)), np.empty(running.size, np.int64)
        for i in range(running.size):
            tokens[i] = choices.tokens[choices.requests[running[i]], done - 1]
    return rows
