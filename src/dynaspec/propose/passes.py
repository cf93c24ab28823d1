"""Draft passes one by one from Python, on any device: of chains and of trees.

They are for where processors, a grammar or a device have to be waited for between passes; otherwise a whole draft on
CPU is one compiled call (``chain``). Here is also what follows a pass's logits: a token for each request, what speaks
for it, and who goes on.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints
from dynaspec.contract.step import SpecPlan, StopRule
from dynaspec.kv.blocks import BlockTables
from dynaspec.model.batch import ForwardBatch
from dynaspec.model.state_heads.base import StateHeads
from dynaspec.sampling import ops
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.state import SamplerState

from .drafter import Drafter
from .drawing import Choices, Drawn, FirstChoices, Spread
from .growth import Growth, add_nodes, next_parents, parent_rows, paths, rows_above, tokens_of


class DraftPasses(Protocol):
    """The draft tokens of one propose call, filled one position a pass."""

    @property
    def choices(self) -> Choices | None:
        """The same for compiled code; None where Python has to look at each pass."""
        ...

    def take(self, logits: torch.Tensor, running: Ints, done: int) -> Ints:
        """Token number ``done`` (1-based) of the rows that ran.

        Args:
            logits: [r, V] of the drafter, raw.
            running: [r] rows, as indices into the requests that draft.

        Returns:
            The rows that go on, as far as the host knows.
        """
        ...

    def tokens(self, requests: Ints, position: int) -> torch.Tensor:
        """[r] int64 drafted at ``position`` (0-based), on the device; ``requests`` are places in the batch."""
        ...

    def confidence(self, requests: Ints, position: int) -> npt.NDArray[np.float32]:
        """[r] the confidence in these tokens, on the host; waits for the device."""
        ...

    def finish(self, granted: Ints) -> Drafts:
        """The drafts, cut to their final lengths; ``granted`` [B] lengths were asked for."""
        ...


def rule_of(plan: SpecPlan, requests: Ints) -> StopRule | None:
    """The plan's stop rule for some of its requests [A]."""
    if plan.stop is None or requests.size == len(plan.depth):
        return plan.stop
    return plan.stop.select(requests.tolist())


def draft_passes(
    sampler: SamplerState,
    batch: DecodeBatch,
    requests: Ints,
    granted: Ints,
    rule: StopRule | None,
    vocab_size: int,
    device: torch.device,
    vocabulary: Ints | None = None,
    *,
    probabilistic: bool,
    raw: bool = False,
) -> DraftPasses:
    """
    Args:
        requests: [A] places in the batch of those that draft.
        granted: [A] their longest drafts, ≥ 1.
        rule: of these requests alone.
        vocab_size: the target's.
        vocabulary: [V] the target's ids of the tokens that logits are about; None = all, in their order.
        probabilistic: draw from the drafter's processed distribution; else take its most probable token.
        raw: take the most probable token of all, whatever the requests' processors do to it.
    """
    lanes = batch.lanes
    most_probable = raw or not probabilistic or bool(sampler.greedy[lanes].all())
    first_choice = raw or (most_probable and sampler.leaves_alone(lanes))
    if first_choice and device.type == "cpu":
        return FirstChoices(batch, requests, granted, rule, vocabulary)
    return Drawn(
        sampler,
        batch,
        requests,
        granted,
        rule,
        vocab_size,
        device,
        vocabulary,
        most_probable=most_probable,
        first_choice=first_choice,
    )


def grow_by_passes(
    growth: Growth,
    drafter: Drafter,
    sampler: SamplerState,
    tables: BlockTables,
    batch: DecodeBatch,
    hidden: torch.Tensor,
) -> list[int]:
    """Grows trees until no pass pays any more.

    Args:
        growth: trees without nodes.
        hidden: [A, hidden] what the passes over their last committed tokens were left with.

    Returns:
        Rows of each pass.
    """
    spread = Spread.over(drafter.vocabulary, drafter.vocab_size, drafter.device)
    who, above = np.arange(growth.made.size), np.full(growth.made.size, -1)
    states = hidden.new_zeros(growth.made.size, 1 + growth.parents.shape[1], hidden.shape[1])
    """What passes were left with after the root and each parent."""
    states[:, 0] = hidden
    rows_per_pass: list[int] = []
    for done in range(1, int(growth.depth.max(initial=0)) + 1):
        scores = drafter.logits(hidden)
        _add(growth, who, above, scores if spread is None else spread(scores), sampler)
        who, above = next_parents(growth, done)
        if not who.size:
            break
        requests, fields, tokens, ancestors, owners, nodes, fresh = parent_rows(
            growth, who, above, batch.block_tables, tables.block_size
        )
        query_start, _, positions, slots, block_tables = fields
        before = growth.above[owners, nodes]
        place = np.where(before < 0, 0, 1 + growth.row[owners, before])
        out = drafter.extend(
            ForwardBatch(
                tokens=torch.from_numpy(tokens).to(drafter.device),
                positions=positions,
                slots=slots,
                query_start=query_start,
                context_lens=growth.lengths[requests].astype(np.int32),
                block_tables=block_tables,
                ancestors=ancestors,
            ),
            states[ops.to_device(owners, states), ops.to_device(place, states)],
        )
        hidden = out[ops.to_device(fresh, out)]
        states[ops.to_device(who, states), ops.to_device(1 + growth.row[who, above], states)] = hidden
        rows_per_pass.append(int(positions.size))
    return rows_per_pass


def grow_by_heads(growth: Growth, heads: StateHeads, sampler: SamplerState, hidden: torch.Tensor) -> list[int]:
    """The same with heads that keep no KV, one a depth.

    Args:
        hidden: [A, width] the target's states before the newest tokens.

    Returns:
        Rows of each head.
    """
    spread = Spread.over(heads.vocabulary, heads.vocab_size, heads.device)
    state, rows = heads.begin(hidden), []
    who, above = np.arange(growth.made.size), np.full(growth.made.size, -1)
    for done in range(1, int(growth.depth.max(initial=0)) + 1):
        tokens = torch.from_numpy(tokens_of(growth, who, above)).to(heads.device)
        state, scores = heads.run(done - 1, state, tokens)
        rows.append(int(who.size))
        _add(growth, who, above, scores if spread is None else spread(scores), sampler)
        before, (who, above) = (who, above), next_parents(growth, done)
        if not who.size:
            break
        state = state[ops.to_device(rows_above(growth, who, above, *before), state)]
    return rows


def _add(growth: Growth, who: Ints, above: Ints, logits: torch.Tensor, sampler: SamplerState) -> None:
    """Children of the nodes ``above`` [r], by logits [r, vocabulary] of all the target's tokens."""
    depth, drafted = paths(growth, who, above)
    scores = sampler.process(logits, Rows(growth.lanes[who], np.arange(who.size), depth, drafted))
    add_nodes(growth, who, above, *ops.top(scores, min(growth.width, scores.shape[1])))
