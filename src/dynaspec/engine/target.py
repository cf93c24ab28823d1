"""The target pass of a step: one forward over all rows, exact acceptance, log-probabilities of what was asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dynaspec.contract.proposer import Drafts, Ints
from dynaspec.contract.step import SpecPlan
from dynaspec.kv.blocks import Arena
from dynaspec.model.decoder import Model
from dynaspec.model.taps import Taps
from dynaspec.sampling.draw import logprobs
from dynaspec.sampling.grammar import DeadEnd
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.state import SamplerState
from dynaspec.schedule.batch import Chunk, StepBatch, StepResult
from dynaspec.schedule.request import TokenLogprobs
from dynaspec.verify.chain import Accepted, BlockVerification, accept_chain
from dynaspec.verify.synthetic import SyntheticAcceptance
from dynaspec.verify.tree import accept_tree

from .layout import PassLayout, lay_out

logger = logging.getLogger(__name__)

AcceptChain = Callable[[torch.Tensor, Rows, Drafts, Ints, SamplerState], Accepted]


@dataclass(slots=True)
class TargetPass:
    """What proposers are told of the pass; satisfies ``contract.proposer.TargetStep``."""

    lanes: Ints
    lengths: Ints
    accepted: Ints


@dataclass(slots=True)
class Verified:
    """A step's result, and the work of its target pass."""

    result: StepResult
    target: TargetPass
    verify_rows: int
    prefill_rows: int
    kv_tokens: int


class TargetVerifier:
    """Runs the target over decoding requests' drafts and over prefill chunks, in one pass."""

    def __init__(
        self,
        model: Model,
        arena: Arena,
        sampler: SamplerState,
        block_size: int,
        taps: Taps | None = None,
        synthetic_rates: tuple[float, ...] | None = None,
        in_blocks: bool = False,
    ) -> None:
        """
        Args:
            taps: where the hidden states go that proposers want; None = they want none.
            synthetic_rates: accept drafts at these rates instead of exactly (see ``verify.synthetic``); output is
                then not the target's. None = exact.
            in_blocks: drawn drafts are verified as wholes (see ``verify.chain``), not token by token.

        Raises:
            ConfigError: impossible rates.
        """
        self._model = model
        self._arena = arena
        self._sampler = sampler
        self._block_size = block_size
        self._taps = taps
        self._accept_chain: AcceptChain = (
            partial(accept_chain, sampling=BlockVerification) if in_blocks else accept_chain
        )
        if synthetic_rates is not None:
            self._accept_chain = SyntheticAcceptance(synthetic_rates).accept_chain
            logger.warning(
                "SYNTHETIC ACCEPTANCE at the rates %s: the text is meaningless; for performance work only",
                list(synthetic_rates),
            )

    def load_trees(self) -> None:
        """Loads what the model needs for trees, or the first one would wait for it."""
        slot = torch.zeros(1, dtype=torch.int64, device=self._model.device)
        self._model.move_kv(self._arena.layers, slot, slot)

    def verify(self, batch: StepBatch, drafts: Drafts, plan: SpecPlan) -> Verified:
        """Tests each request's first ``plan.nodes`` drafted tokens (no more than were drafted; of chains, no more than
        a grammar allows)."""
        lens = np.minimum(np.array(plan.nodes, dtype=np.int64), drafts.lens)
        if drafts.parents is None:
            lens = self._sampler.grammars.testable(batch.lanes, drafts.tokens, lens)
        layout = lay_out(batch, drafts, lens, self._block_size)
        hidden = self._model.forward(layout.forward_batch(self._model.device), self._arena.layers, self._taps)
        result = self._sample(batch, drafts, layout, hidden)
        return Verified(
            result=result,
            target=_target_pass(batch, layout, result),
            verify_rows=layout.decode_rows,
            prefill_rows=len(layout.rows.slots) - layout.decode_rows,
            kv_tokens=int(layout.rows.positions.sum()) + len(layout.rows.positions),
        )

    def _sample(self, batch: StepBatch, drafts: Drafts, layout: PassLayout, hidden: torch.Tensor) -> StepResult:
        requests = len(batch.requests)
        if layout.sampled_at.size == 0:
            none = np.zeros(0, dtype=np.int64)
            result = StepResult(none, none, none, np.zeros((0, 1), dtype=np.int64), [None] * len(batch.chunks))
            _collect_logprobs(batch, layout, self._model, hidden, None, result)
            return result
        sampled = hidden
        if layout.sampled_at.size < hidden.shape[0]:  # else every row gives a token, as where nobody reads a prompt
            sampled = hidden[torch.from_numpy(layout.sampled_at).to(hidden.device)]
        logits = self._model.logits(sampled)
        scores = self._sampler.process(logits, layout.sampled)
        walked = None
        if layout.trees is None:
            verdict = self._accept_chain(scores, layout.sampled, layout.drafts, layout.drafts.lens, self._sampler)
        else:
            deepest = layout.sampled.drafts.shape[1]
            walked = accept_tree(scores, layout.sampled, layout.trees, deepest, self._sampler)
            verdict = walked.accepted
            self._put_in_place(layout, walked.path[:requests])
        completing = iter(verdict.tokens[requests:, 0].tolist())
        result = StepResult(
            drafted=drafts.lens,
            verified=layout.drafts.lens[:requests],
            accepted=verdict.accepted[:requests],
            tokens=verdict.tokens[:requests],
            chunk_tokens=[next(completing) if chunk.completes else None for chunk in batch.chunks],
            refused=verdict.refused[:requests],
            verdict=None if walked is None else walked.verdict[:requests],
            whole=None if walked is None else walked.whole[:requests],
            dead_ends=self._dead_ends(batch, verdict),
        )
        _collect_logprobs(batch, layout, self._model, hidden, logits, result, None if walked is None else walked.path)
        return result

    def _put_in_place(self, layout: PassLayout, path: Ints) -> None:
        """Moves KV and hidden states of the accepted nodes ``path`` [B, depth] to where a chain's would be."""
        request, place = np.nonzero((path >= 0) & (path != np.arange(path.shape[1])))
        if not request.size:
            return
        first = layout.rows.query_start[request] + 1
        slots = layout.rows.slots[first + path[request, place]], layout.rows.slots[first + place]
        source, target = (torch.from_numpy(column).to(self._model.device) for column in slots)
        self._model.move_kv(self._arena.layers, source, target)
        if self._taps is not None:
            self._taps.move(source, target)

    def _dead_ends(self, batch: StepBatch, verdict: Accepted) -> dict[str, DeadEnd]:
        stuck = np.flatnonzero(verdict.dead_end)
        if not stuck.size:
            return {}
        completing = [chunk for chunk in batch.chunks if chunk.completes]
        ids = [*batch.ids, *(chunk.request.id for chunk in completing)]
        lanes = [*batch.lanes.tolist(), *(chunk.lane for chunk in completing)]
        accepted = [verdict.tokens[i, : verdict.accepted[i]].tolist() for i in range(len(ids))]
        return {ids[i]: self._sampler.grammars.dead_end(lanes[i], accepted[i]) for i in stuck.tolist()}


def _target_pass(batch: StepBatch, layout: PassLayout, result: StepResult) -> TargetPass:
    requests = len(batch.requests)
    accepted = np.zeros(len(layout.lanes), dtype=np.int64)
    accepted[:requests] = result.accepted
    lengths = layout.starts.copy()
    lengths[:requests] = batch.lengths
    return TargetPass(layout.lanes, lengths, accepted)


def _collect_logprobs(
    batch: StepBatch,
    layout: PassLayout,
    model: Model,
    hidden: torch.Tensor,
    logits: torch.Tensor | None,
    result: StepResult,
    path: Ints | None = None,
) -> None:
    """Adds to ``result`` what requests asked for; costs nothing when nobody did.

    Args:
        hidden: [rows that are read, hidden]
        logits: [sampled rows, V] raw; None if the pass has no sampled rows.
        path: [B, depth] accepted nodes, where drafts are trees.
    """
    if logits is not None:
        _collect_output(batch, layout, logits, result, path)
    for c, chunk in enumerate(batch.chunks):
        if chunk.request.params.prompt_logprobs is not None:
            first = layout.first_read(len(batch.requests) + c)
            _collect_prompt(chunk, model, hidden[first : first + chunk.count], result)


def _collect_output(
    batch: StepBatch, layout: PassLayout, logits: torch.Tensor, result: StepResult, path: Ints | None
) -> None:
    starts = layout.rows.query_start
    for i, request in enumerate(batch.requests):
        if request.params.logprobs is not None:
            emitted = result.tokens[i, : result.accepted[i] + 1]
            drafted = np.arange(len(emitted) - 1) if path is None else path[i, : len(emitted) - 1]
            rows = logits[torch.from_numpy(int(starts[i]) + np.append(0, 1 + drafted)).to(logits.device)]
            result.logprobs[request.id] = _entries(rows, emitted, request.params.logprobs)
    row = layout.decode_rows
    for chunk, token in zip(batch.chunks, result.chunk_tokens, strict=True):
        if token is None:
            continue
        if chunk.request.params.logprobs is not None:
            rows, tokens = logits[row : row + 1], np.array([token])
            result.logprobs[chunk.request.id] = _entries(rows, tokens, chunk.request.params.logprobs)
        row += 1


def _collect_prompt(chunk: Chunk, model: Model, hidden: torch.Tensor, result: StepResult) -> None:
    """Row p gives the log-probability of prompt token p + 1; rows known from before a preemption are left out."""
    request = chunk.request
    first = max(chunk.start, len(request.prompt_logprobs))
    last = min(chunk.start + chunk.count, len(request.prompt) - 1)
    if first < last and request.params.prompt_logprobs is not None:
        logits = model.logits(hidden[first - chunk.start : last - chunk.start])
        tokens = request.prompt[first + 1 : last + 1].astype(np.int64)
        result.prompt_logprobs[request.id] = _entries(logits, tokens, request.params.prompt_logprobs)


def _entries(logits: torch.Tensor, tokens: Ints, top_n: int) -> list[TokenLogprobs]:
    columns = logprobs(logits, tokens, top_n)
    per_position = zip(
        tokens.tolist(),
        columns.chosen.tolist(),
        columns.chosen_rank.tolist(),
        columns.top_tokens.tolist(),
        columns.top.tolist(),
        strict=True,
    )
    return [TokenLogprobs(t, p, r, tuple(ids), tuple(top)) for t, p, r, ids, top in per_position]
