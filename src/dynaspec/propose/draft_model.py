"""A small model drafts token by token (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

It keeps its own KV in its own arena, under the target's block tables. Its first pass ingests whatever committed
tokens it lacks; each further pass one draft token a row. Rows that stop leave the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints, ProposerNeeds, TargetStep
from dynaspec.contract.step import ProposerTraits, SpecPlan
from dynaspec.kv.arena import Arena
from dynaspec.kv.rows import ragged_rows
from dynaspec.kv.tables import BlockTables
from dynaspec.model.base import Model
from dynaspec.model.batch import ForwardBatch
from dynaspec.sampling.state import SamplerState

from .drawing import DraftColumns
from .none import no_drafts
from .stopping import stop_mask
from .watermark import Watermarks


class DraftModelProposer:
    """Autoregressive drafting with a model of the target's vocabulary."""

    traits = ProposerTraits(name="draft_model")
    needs = ProposerNeeds(kv=True)

    def __init__(
        self,
        model: Model,
        arena: Arena,
        tables: BlockTables,
        sampler: SamplerState,
        *,
        max_length: int,
        probabilistic: bool = True,
        catch_up_tokens: int = 512,
    ) -> None:
        """
        Args:
            max_length: tokens that the drafter's positions can hold; longer requests are not drafted for.
            probabilistic: draw drafts from the drafter's processed distribution; else take its most probable token.
            catch_up_tokens: rows a request may ingest in one step. One that lags further drafts nothing until
                it has caught up, in chunks of this size.
        """
        self._model = model
        self._arena = arena
        self._tables = tables
        self._sampler = sampler
        self._max_length = max_length
        self._probabilistic = probabilistic
        self._catch_up = catch_up_tokens
        self._marks = Watermarks(tables, len(tables.array))

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return tuple((batch.lengths - 1 - self._marks.seen[batch.lanes]).tolist())

    def peek(self, batch: DecodeBatch) -> tuple[tuple[int, int], ...] | None:
        return None

    def admit(self, lane: int, cached_blocks: Sequence[int]) -> None:
        self._marks.admit(lane, cached_blocks)

    def evict(self, lane: int) -> None:
        self._marks.admit(lane, ())

    def advance(self, step: TargetStep) -> None:
        self._marks.settle(step.lanes, step.lengths, step.accepted)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        wanted = np.array(plan.depth, dtype=np.int64)
        depth = np.clip(self._max_length - batch.lengths, 0, wanted)
        lagging = batch.lengths - self._marks.seen[batch.lanes] > self._catch_up
        drafting = np.flatnonzero((depth > 0) & ~lagging)
        catching_up = np.flatnonzero((depth > 0) & lagging)
        if drafting.size or catching_up.size:
            drafts = self._draft(batch, plan, depth, drafting, catching_up)
        else:
            drafts = no_drafts(len(wanted))
        drafts.skipped = {batch.ids[i]: "catching_up" for i in catching_up.tolist()}
        too_long = np.flatnonzero((wanted > 0) & (depth == 0)).tolist()
        drafts.skipped |= {batch.ids[i]: "drafter_length" for i in too_long}
        return drafts

    def _draft(self, batch: DecodeBatch, plan: SpecPlan, depth: Ints, index: Ints, catching_up: Ints) -> Drafts:
        """Requests ``index`` draft up to ``depth`` tokens; ``catching_up`` only ingest."""
        columns = DraftColumns(
            self._sampler,
            batch.lanes,
            int(depth[index].max(initial=0)),
            self._model.config.vocab_size,
            self._model.device,
            probabilistic=self._probabilistic,
        )
        mask = stop_mask(plan.stop, depth[index], self._model.device)
        ingested, hidden = self._ingest(batch, index, catching_up)
        rows_per_pass = [ingested]
        running = np.arange(index.size)
        for done in range(1, int(depth[index].max(initial=0)) + 1):
            signal = columns.draw(self._model.logits(hidden), index[running], done - 1, plan.stop)
            mask.update(done, running, signal)
            running = mask.running(done)
            if not running.size:
                break
            hidden = self._extend(batch, index[running], columns.tokens(index[running], done - 1), done)
            rows_per_pass.append(int(running.size))
        return columns.finish(index, mask.lengths(), depth, tuple(rows_per_pass))

    def _ingest(self, batch: DecodeBatch, index: Ints, catching_up: Ints) -> tuple[int, torch.Tensor]:
        """Processes committed tokens not seen yet; returns the rows it took and the last hidden state of ``index``."""
        requests = np.concatenate([index, catching_up])
        lanes = batch.lanes[requests]
        start = self._marks.seen[lanes]
        count = np.minimum(batch.lengths[requests] - start, self._catch_up)
        rows = ragged_rows(batch.block_tables, self._tables.block_size, lanes, start, count)
        tokens = torch.from_numpy(batch.tokens[rows.lanes, rows.positions].astype(np.int64))
        hidden = self._forward(
            ForwardBatch(
                tokens=tokens.to(self._model.device),
                positions=rows.positions,
                slots=rows.slots,
                query_start=rows.query_start,
                context_lens=start.astype(np.int32),
                block_tables=rows.block_tables,
            )
        )
        for lane, seen in zip(lanes.tolist(), (start + count).tolist(), strict=True):
            self._marks.ingest(lane, seen)
        last = torch.from_numpy(rows.query_start[1 : index.size + 1].astype(np.int64) - 1)
        return int(count.sum()), hidden[last.to(hidden.device)]

    def _extend(self, batch: DecodeBatch, requests: Ints, tokens: torch.Tensor, done: int) -> torch.Tensor:
        """One pass over draft token number ``done`` of each request; returns [r, hidden]."""
        lanes = batch.lanes[requests]
        position = batch.lengths[requests] + done - 1
        rows = ragged_rows(batch.block_tables, self._tables.block_size, lanes, position, np.ones_like(position))
        hidden = self._forward(
            ForwardBatch(
                tokens=tokens,
                positions=rows.positions,
                slots=rows.slots,
                query_start=rows.query_start,
                context_lens=position.astype(np.int32),
                block_tables=rows.block_tables,
            )
        )
        self._marks.ingest_drafts(lanes)
        return hidden

    def _forward(self, rows: ForwardBatch) -> torch.Tensor:
        return self._model.forward(rows, self._arena.layers).hidden
