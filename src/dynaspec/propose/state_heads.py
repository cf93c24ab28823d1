"""Heads that keep no KV draft from the target's last hidden state: Medusa's, and the MLP speculator's.

The newest token has not been through the target yet, so a request's last hidden state is that of the token before it.
Hidden states are kept like KV (``model.taps``), so it is there whatever came between two drafts, and nothing is ever
caught up with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.compiled import kernel, rows_at
from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints, ProposerNeeds
from dynaspec.contract.step import ProposerTraits, SpecPlan, StopRule, TreeRule
from dynaspec.kv.blocks import BlockTables
from dynaspec.model.kernels.state_heads import (
    CompiledHeads,
    CompiledMedusa,
    CompiledMlp,
    medusa_logits,
    mlp_begin,
    mlp_logits,
    mlp_step,
)
from dynaspec.model.state_heads.base import StateHeads
from dynaspec.model.taps import Taps
from dynaspec.sampling.state import SamplerState

from .drawing import Choices, take_first
from .growth import NOTHING, Growth, add_best, as_drafts, grow, next_parents, rows_above, tokens_of
from .guard import Stateless, no_drafts
from .passes import DraftPasses, draft_passes, grow_by_heads, rule_of
from .warm_up import no_growth, nobody
from .watermark import slots_before

Int32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


Chain = Callable[[Int32, int, Choices], Ints]
"""A whole draft in one call: of (tables, block_size, choices), as ``draft_heads``."""
Tree = Callable[[Int32, int, Ints, Growth], Ints]
"""The same for trees: of (tables, block_size, known, growth)."""


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


@dataclass(frozen=True, slots=True)
class StateHeadsRunner:
    """Runs heads to be timed; satisfies ``pass_timing.Passes``."""

    heads: StateHeads
    at_once: bool
    """All heads are one pass; else a pass is one head."""

    @property
    def compiled(self) -> bool:
        return self.heads.compiled is not None

    @property
    def tokens_a_row(self) -> int:
        return self.heads.longest if self.at_once else 1

    def run(self, rows: int, context: int = 0, rows_each: int = 1, passes: int = 1) -> None:
        """See ``Passes``; heads see no context."""
        heads = self.heads
        tokens = torch.zeros(rows, dtype=torch.int64, device=heads.device)
        hidden = torch.zeros(rows, heads.width, dtype=heads.dtype, device=heads.device)
        state = heads.begin(hidden)
        for head in range(passes * self.tokens_a_row):
            if head % heads.longest == 0:
                state = heads.begin(hidden)
            state, logits = heads.run(head % heads.longest, state, tokens)
        logits[0, 0].item()


@dataclass(frozen=True, slots=True)
class StateHeadsDrafter:
    """Heads, and where they read."""

    heads: StateHeads
    traits: ProposerTraits
    """Of the method."""
    taps: Taps
    """Where the target keeps its state after the final norm, and no other."""

    @property
    def at_once(self) -> bool:
        """All heads are one pass."""
        return self.traits.passes_per_draft == "one"

    @property
    def runner(self) -> StateHeadsRunner:
        """For timing passes."""
        return StateHeadsRunner(self.heads, self.at_once)


class StateHeadsProposer(Stateless):
    """See ``contract.proposer.Proposer``. The target keeps what it reads."""

    def __init__(
        self,
        drafter: StateHeadsDrafter,
        tables: BlockTables,
        sampler: SamplerState,
        *,
        max_length: int | None,
        probabilistic: bool = True,
    ) -> None:
        """
        Args:
            max_length: tokens of the longest request that is drafted for; None = any.
            probabilistic: draw drafts from the heads' processed distributions; else take their most probable tokens.
        """
        heads = drafter.heads
        self.traits = replace(drafter.traits, longest=heads.longest)
        self.needs = ProposerNeeds(taps=drafter.taps.states)
        self._heads = heads
        self._at_once = drafter.at_once
        self._states = drafter.taps.arena
        self._tables = tables
        self._sampler = sampler
        self._max_length = max_length
        self._probabilistic = probabilistic
        self._chain: Chain | None = None
        self._tree: Tree | None = None
        if heads.compiled is not None:
            states = self._states.numpy()
            self._chain, self._tree = chain_of(heads.compiled, states), tree_of(heads.compiled, states)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        wanted = np.array(plan.depth, dtype=np.int64)
        depth = np.minimum(wanted, self._heads.longest)
        if self._max_length is not None:
            depth = np.maximum(np.minimum(depth, self._max_length - batch.lengths), 0)
        depth[batch.lengths < 2] = 0  # the target has not processed any token
        index = depth.nonzero()[0]
        drafts = self._draft(batch, plan, depth, index) if index.size else no_drafts(len(wanted))
        ids = batch.ids
        drafts.skipped = {ids[i]: "drafter_length" for i in ((wanted > 0) & (depth == 0)).nonzero()[0].tolist()}
        return drafts

    def _draft(self, batch: DecodeBatch, plan: SpecPlan, depth: Ints, index: Ints) -> Drafts:
        """Requests ``index`` draft up to ``depth`` tokens."""
        granted = depth[index]
        rule = rule_of(plan, index)
        if plan.tree is not None:
            return self._draft_trees(batch, plan, plan.tree, granted, index, rule)
        passes = draft_passes(
            self._sampler,
            batch,
            index,
            granted,
            rule,
            self._heads.vocab_size,
            self._heads.device,
            self._heads.vocabulary,
            probabilistic=self._probabilistic,
        )
        if passes.choices is not None and self._chain is not None:
            rows = self._chain(batch.block_tables, self._tables.block_size, passes.choices).tolist()
        else:
            rows = self._run(batch, passes, index, int(granted.max()))
        drafts = passes.finish(depth)
        drafts.rows_per_pass = tuple(rows[:1] if self._at_once else rows)
        return drafts

    def _draft_trees(
        self, batch: DecodeBatch, plan: SpecPlan, rule: TreeRule, granted: Ints, index: Ints, stop: StopRule | None
    ) -> Drafts:
        growth = grow(batch, index, granted, np.array(plan.nodes, dtype=np.int64)[index], rule, stop)
        if self._tree is not None and self._sampler.leaves_alone(growth.lanes):
            known = NOTHING if self._heads.vocabulary is None else self._heads.vocabulary
            rows = self._tree(batch.block_tables, self._tables.block_size, known, growth).tolist()
        else:
            before = slots_before(batch.block_tables, self._tables.block_size, growth.lanes, growth.lengths - 1)
            hidden = self._states[torch.from_numpy(before).to(self._heads.device)]
            rows = grow_by_heads(growth, self._heads, self._sampler, hidden)
        drafts = as_drafts(growth, index, plan)
        drafts.rows_per_pass = tuple(rows[:1] if self._at_once else rows)
        return drafts

    def _run(self, batch: DecodeBatch, passes: DraftPasses, index: Ints, longest: int) -> list[int]:
        """The heads, one after the other; returns the rows of each."""
        device, lanes, lengths = self._heads.device, batch.lanes[index], batch.lengths[index]
        before = slots_before(batch.block_tables, self._tables.block_size, lanes, lengths - 1)
        state = self._heads.begin(self._states[torch.from_numpy(before).to(device)])
        tokens = torch.from_numpy(batch.tokens[lanes, lengths - 1].astype(np.int64)).to(device)
        running, rows = np.arange(index.size), []
        for done in range(1, longest + 1):
            state, logits = self._heads.run(done - 1, state, tokens)
            rows.append(int(running.size))
            ran, running = running, passes.take(logits, running, done)
            if not running.size:
                break
            if running.size < ran.size:
                state = state[torch.from_numpy(np.searchsorted(ran, running)).to(device)]
            tokens = passes.tokens(index[running], done - 1)
        return rows
