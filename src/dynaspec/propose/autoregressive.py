"""Drafting token by token, by whatever runs a pass (``Drafter``): a small model, or a head on hidden states.

It keeps its own KV in its own arena, under the target's block tables, or shares the target's. If its tokens are not the
target's, it reads texts of its own under block tables of its own, see ``own_vocabulary.py``. Its first pass ingests
whatever committed tokens it lacks; each further pass one draft token a row. Rows that stop leave the batch.

For a probe it may be asked to read the latest tokens of a request only (``SpecPlan.probe_context``), as if the text
began with them, and to draft one token. Their KV lies behind the watermark, where it counts for nothing.

Under KV-write gating (``SpecPlan.gate_kv_below``) slot, position and context of a draft token come apart: see
``watermark.py``. What was left out lies behind the watermark, and is ingested again if it is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints, NewText, Offers, ProposerNeeds, TargetStep
from dynaspec.contract.step import ProposerTraits, SpecPlan, TreeRule
from dynaspec.kv.blocks import BlockTables
from dynaspec.kv.rows import RaggedRows, ragged_rows
from dynaspec.model.batch import ForwardBatch
from dynaspec.sampling.state import SamplerState

from .chain import Chain, Tree
from .drafter import Drafter
from .drawing import Choices
from .growth import NOTHING, as_drafts, grow
from .guard import no_drafts
from .own_vocabulary import OwnTexts
from .passes import DraftPasses, draft_passes, grow_by_passes, rule_of
from .watermark import Watermarks, WriteGate, leave_out, probe_from, slots_before, unread_rows


class _Ran(NamedTuple):
    """The passes of a propose call."""

    rows_per_pass: tuple[int, ...]
    processed: Ints
    """[A] draft tokens of each that drafts."""
    redone: int
    """Committed tokens that had been processed before."""


class AutoregressiveProposer:
    """See ``contract.proposer.Proposer``."""

    def __init__(
        self,
        drafter: Drafter,
        tables: BlockTables,
        sampler: SamplerState,
        *,
        max_length: int,
        probabilistic: bool = True,
        catch_up_tokens: int = 512,
        texts: OwnTexts | None = None,
    ) -> None:
        """
        Args:
            max_length: tokens that the drafter's positions can hold; longer requests are not drafted for.
            probabilistic: draw drafts from the drafter's processed distribution; else take its most probable token.
            catch_up_tokens: rows a request may ingest in one step. One that lags further drafts nothing until
                it has caught up, in chunks of this size.
            texts: of a drafter with tokens of its own (``Drafter.translation``).
        """
        self.traits: ProposerTraits = drafter.traits
        self.needs = ProposerNeeds(taps=drafter.taps, kv=True)
        self._drafter = drafter
        self._texts = texts
        self._tables = tables = tables if texts is None else texts.tables
        self._sampler = sampler
        self._max_length = max_length
        self._probabilistic = probabilistic
        self._catch_up = catch_up_tokens
        self._marks = Watermarks(tables, len(tables.array), drafter.unread)
        self._chain: Chain | None = drafter.chain
        self._tree: Tree | None = drafter.tree

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        if self._drafter.targets_kv:
            return (0,) * len(batch.ids)
        if self._texts is not None:
            return tuple(self._texts.lag(batch, self._marks.seen[batch.lanes]).tolist())
        # A request that has just taken a lane over is known here from the step on: until then it is its predecessor's.
        return tuple(np.maximum(batch.lengths - 1 - self._marks.seen[batch.lanes], 0).tolist())

    def peek(self, batch: DecodeBatch) -> Offers | None:
        return None

    def commit(self, text: NewText) -> None:
        """Nothing to keep: it reads what is new when it drafts."""

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        if self._texts is not None:
            self._texts.admit(lane, cache_salt)
        self._marks.admit(lane, cached_blocks if self._texts is None else ())

    def evict(self, lane: int) -> None:
        self.admit(lane, (), "")

    def advance(self, step: TargetStep) -> None:
        if self._texts is None:  # else it is for the next draft to see which tokens have remained
            self._marks.settle(step.lanes, step.lengths, step.accepted)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        wanted = np.array(plan.depth, dtype=np.int64)
        text, skipped = self._text(batch, wanted)
        depth = np.maximum(np.minimum(self._max_length - text.lengths, wanted), 0)
        depth[text.lengths <= self._drafter.unread] = 0
        if self._drafter.targets_kv:
            self._marks.seen[batch.lanes] = batch.lengths - 1
        read = seen = self._marks.seen[batch.lanes]
        if plan.probe_context:
            read = probe_from(text, depth > 0, seen, self._tables, plan.probe_context)
            depth = np.where(read > seen, np.minimum(depth, 1), depth)
        lagging = text.lengths - read > self._catch_up
        drafting = ((depth > 0) & ~lagging).nonzero()[0]
        catching_up = ((depth > 0) & lagging).nonzero()[0]
        if drafting.size or catching_up.size:
            drafts = self._draft(batch, text, plan, depth, read, drafting, catching_up)
        else:
            drafts = no_drafts(len(wanted))
        too_long = ((wanted > 0) & (depth == 0)).nonzero()[0]
        skipped |= _reasons(batch, catching_up, "catching_up") | _reasons(batch, too_long, "drafter_length")
        drafts.skipped = skipped
        return drafts

    def _text(self, batch: DecodeBatch, wanted: Ints) -> tuple[DecodeBatch, dict[str, str]]:
        """The batch in the tokens that the drafter reads, and which requests it cannot draft for, whose ``wanted`` [B]
        become 0."""
        if self._texts is None:
            return batch, {}
        text, skipped = self._texts.follow(batch, wanted, self._marks)
        wanted[[request in skipped for request in batch.ids]] = 0
        return text, skipped

    def _draft(
        self,
        batch: DecodeBatch,
        text: DecodeBatch,
        plan: SpecPlan,
        depth: Ints,
        read: Ints,
        index: Ints,
        catching_up: Ints,
    ) -> Drafts:
        """Requests ``index`` draft up to ``depth`` tokens; ``catching_up`` only ingest. ``read``: see ``_ingest``.

        Args:
            text: the batch in the tokens that the drafter reads.
        """
        if plan.tree is not None and self.traits.trees:
            return self._draft_trees(batch, plan, plan.tree, depth, read, index, catching_up)
        drafts_text = self._texts is not None and self._texts.drafts_text
        granted = depth[index]
        passes = draft_passes(
            self._sampler,
            text if drafts_text else batch,
            index,
            granted,
            rule_of(plan, index),
            self._drafter.vocab_size,
            self._drafter.device,
            self._drafter.vocabulary,
            probabilistic=self._probabilistic,
            raw=drafts_text,
        )
        gate = WriteGate(plan.gate_kv_below, index.size) if plan.gate_kv_below > 0.0 else None
        plain = gate is None and not plan.probe_context and not catching_up.size
        if plain and passes.choices is not None and self._chain is not None:
            ran = self._run_compiled(self._chain, text, passes.choices, read)
        else:
            ran = self._run(text, passes, read, index, catching_up, gate, int(granted.max(initial=0)))
        if not self._drafter.reads_again:
            in_place = ran.processed if gate is None else gate.in_place
            self._marks.ingest_drafts(batch.lanes[index], ran.processed, in_place)
        drafts = passes.finish(depth)
        drafts.rows_per_pass = ran.rows_per_pass
        drafts.kv_skipped, drafts.kv_redone = 0 if gate is None else gate.skipped, ran.redone
        if self._texts is not None:
            self._texts.remember(batch.lanes[index], drafts.tokens[index], self._marks)
        if self._texts is not None and self._texts.drafts_text:
            drafts = self._texts.to_target(batch, drafts, depth)
        return drafts

    def _draft_trees(
        self,
        batch: DecodeBatch,
        plan: SpecPlan,
        rule: TreeRule,
        depth: Ints,
        read: Ints,
        index: Ints,
        catching_up: Ints,
    ) -> Drafts:
        """The same with trees. None of their KV is kept: accepted tokens are read again, with the next draft."""
        nodes = np.array(plan.nodes, dtype=np.int64)[index]
        growth = grow(batch, index, depth[index], nodes, rule, rule_of(plan, index))
        plain = not plan.probe_context and not catching_up.size and self._sampler.leaves_alone(batch.lanes[index])
        if plain and self._tree is not None:
            known = NOTHING if self._drafter.vocabulary is None else self._drafter.vocabulary
            passes, end = self._tree(
                *(batch.block_tables, self._tables.block_size, read, self._catch_up, batch.lengths, index),
                *(known, growth),
            )
            redone = self._marks.ingest(batch.lanes[index], end)
            rows_per_pass = tuple(passes.tolist())
        else:
            hidden, ingested, redone = self._ingest(batch, read, index, catching_up)
            more = grow_by_passes(growth, self._drafter, self._sampler, self._tables, batch, hidden)
            rows_per_pass = (ingested, *more)
        drafts = as_drafts(growth, index, plan)
        drafts.rows_per_pass, drafts.kv_redone = rows_per_pass, redone
        return drafts

    def _run_compiled(self, chain: Chain, batch: DecodeBatch, choices: Choices, read: Ints) -> _Ran:
        """``_run`` in one call, where nothing has to be done between passes but to take first choices."""
        rows_per_pass, end, processed = chain(
            batch.tokens, batch.lengths, batch.block_tables, self._tables.block_size, read, self._catch_up, choices
        )
        redone = self._marks.ingest(batch.lanes[choices.requests], end)
        return _Ran(tuple(rows_per_pass.tolist()), processed, redone)

    def _run(
        self,
        batch: DecodeBatch,
        passes: DraftPasses,
        read: Ints,
        index: Ints,
        catching_up: Ints,
        gate: WriteGate | None,
        longest: int,
    ) -> _Ran:
        """All passes, one after the other."""
        hidden, ingested, redone = self._ingest(batch, read, index, catching_up)
        rows_per_pass = [ingested]
        running = np.arange(index.size)
        processed = np.zeros_like(index)
        for done in range(1, longest + 1):
            ran = running
            running = passes.take(self._drafter.logits(hidden), running, done)
            if not running.size:
                break
            if running.size < ran.size:
                hidden = hidden[torch.from_numpy(np.searchsorted(ran, running)).to(hidden.device)]
            hidden = self._extend(batch, passes, index, running, done, gate, hidden)
            processed[running] = done
            rows_per_pass.append(int(running.size))
        return _Ran(tuple(rows_per_pass), processed, redone)

    def _ingest(self, batch: DecodeBatch, read: Ints, index: Ints, catching_up: Ints) -> tuple[torch.Tensor, int, int]:
        """Processes committed tokens not seen yet.

        Args:
            read: [B] tokens after which each request is read on. Where that is behind the watermark, what is between
                is left out, and the watermark stays.

        Returns:
            The last hidden states [A, hidden] of ``index``; the rows it took; how many of them were not the first
            for their token.
        """
        requests = np.concatenate([index, catching_up]) if catching_up.size else index
        lanes, start, end, tokens, fields = unread_rows(
            batch.tokens,
            batch.block_tables,
            self._tables.block_size,
            batch.lanes,
            batch.lengths,
            read,
            requests,
            self._catch_up,
        )
        rows = RaggedRows(*fields)
        apart = start > self._marks.seen[lanes]
        if apart.any():
            for lane, before in zip(lanes[apart].tolist(), start[apart].tolist(), strict=True):
                self._marks.spoil(lane, before // self._tables.block_size)
            leave_out(rows, start, apart, self._tables.block_size)
        more = rows.slots.size > index.size  # else it is one row each
        kv_only = None
        if more and not apart.any():  # what is read apart has other positions than KV entries
            kv_only = np.diff(rows.query_start) - 1
            kv_only[index.size :] += 1
        hidden = self._drafter.read(
            ForwardBatch(
                tokens=torch.from_numpy(tokens).to(self._drafter.device),
                positions=rows.positions,
                slots=rows.slots,
                query_start=rows.query_start,
                context_lens=start,
                block_tables=rows.block_tables,
                kv_only=kv_only,
            ),
            slots_before(batch.block_tables, self._tables.block_size, rows.lanes, rows.positions),
        )
        redone = self._marks.ingest(lanes[~apart], end[~apart])
        if more and kv_only is None:
            last = torch.from_numpy(rows.query_start[1 : index.size + 1].astype(np.int64) - 1)
            hidden = hidden[last.to(hidden.device)]
        return hidden, int(rows.slots.size), redone

    def _extend(
        self,
        batch: DecodeBatch,
        passes: DraftPasses,
        index: Ints,
        running: Ints,
        done: int,
        gate: WriteGate | None,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """One pass over draft token number ``done`` of the requests ``index[running]``, after which the pass before
        was left with ``hidden``; returns [r, hidden]."""
        requests = index[running]
        lanes = batch.lanes[requests]
        positions = batch.lengths[requests] + (done - 1)
        context, kept = positions, None
        if gate is not None:
            ahead, kept = gate.place(running, done, passes.confidence(requests, done - 1))
            context = batch.lengths[requests] + ahead
        rows = ragged_rows(batch.block_tables, self._tables.block_size, lanes, context, np.ones_like(lanes))
        if kept is not None:
            rows.slots[~kept] = -1
        return self._drafter.extend(
            ForwardBatch(
                tokens=passes.tokens(requests, done - 1),
                positions=positions,
                slots=rows.slots,
                query_start=rows.query_start,
                context_lens=context.astype(np.int32),
                block_tables=rows.block_tables,
            ),
            hidden,
        )


def _reasons(batch: DecodeBatch, requests: Ints, reason: str) -> dict[str, str]:
    """``reason`` for each of the requests, which are places in the batch."""
    if not requests.size:
        return {}
    ids = batch.ids
    return {ids[i]: reason for i in requests.tolist()}
