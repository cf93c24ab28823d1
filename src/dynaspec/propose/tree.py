"""Drafting trees, by whatever runs a pass (``Drafter``): pass by pass from Python, where processors, a grammar or a
device have to be waited for, or on CPU in one compiled call."""

from __future__ import annotations

import numpy as np
import torch

from dynaspec.contract.proposer import DecodeBatch, Ints
from dynaspec.kv.tables import BlockTables
from dynaspec.model.batch import ForwardBatch
from dynaspec.model.state_heads.base import StateHeads
from dynaspec.sampling import ops
from dynaspec.sampling.rows import Rows
from dynaspec.sampling.state import SamplerState

from .drafter import Drafter
from .growth import Growth, add_nodes, next_parents, parent_rows, paths, rows_above, tokens_of
from .passes import Spread


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
            states[_on(states, owners), _on(states, place)],
        )
        hidden = out[_on(out, fresh)]
        states[_on(states, who), _on(states, 1 + growth.row[who, above])] = hidden
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
        state = state[_on(state, rows_above(growth, who, above, *before))]
    return rows


def _add(growth: Growth, who: Ints, above: Ints, logits: torch.Tensor, sampler: SamplerState) -> None:
    """Children of the nodes ``above`` [r], by logits [r, vocabulary] of all the target's tokens."""
    depth, drafted = paths(growth, who, above)
    scores = sampler.process(logits, Rows(growth.lanes[who], np.arange(who.size), depth, drafted))
    add_nodes(growth, who, above, *ops.top(scores, min(growth.width, scores.shape[1])))


def _on(like: torch.Tensor, index: Ints) -> torch.Tensor:
    return torch.from_numpy(index).to(like.device)
