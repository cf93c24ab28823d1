"""A step of vLLM's as its drafter sees it, with a controller in charge of what is drafted.

vLLM calls at the end of every step, when the target has answered and before anybody knows who has ended::

    the step that ends:  what came of the last drafts → observe     │ propose: plan → draft → trim → lists of tokens

So unlike vLLM's scheduler, which has to decide a step ahead (``step_tracker``), this host knows what was accepted
when it plans, and how long drafting took apart from the rest. Drafts are the drafter's most probable tokens, which
vLLM's verification takes for certain: its output is exact for every request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.proposer import Ints, NewText, Offers
from dynaspec.contract.step import Controller, Limits, Needs, ProposerTraits, SpecPlan, StepView
from dynaspec.control.registry import build_controller
from dynaspec.kv.blocks import Arena, BlockPool, BlockTables, blocks_within
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.model.loader import load_model
from dynaspec.observe.decision_log import DecisionLog, header_of, logged
from dynaspec.observe.stats import SpecStats
from dynaspec.propose.guard import FaultBarrier, TargetPassTimer
from dynaspec.propose.pass_timing import measure_costs
from dynaspec.propose.registry import Source, Weights, build_proposers, load_drafter
from dynaspec.propose.router import Part, Router, draft_view, view_columns
from dynaspec.propose.warm_up import load_kernels
from dynaspec.sampling.state import SamplerState

from .settings import DrafterSettings, told_in
from .texts import DraftResult, Int32, MatchedBatch, PendingStep, Texts, build_outcome, draft_result, load_compiled


@dataclass(slots=True)
class _Committed:
    """Satisfies ``contract.proposer.TargetStep``."""

    lanes: Ints
    lengths: Ints
    accepted: Ints


class Drafting:
    """One worker's drafters and their controller. Called from one thread."""

    def __init__(
        self,
        texts: Texts,
        tables: BlockTables,
        proposers: Router,
        controller: Controller,
        limits: Limits,
        pace: TargetPassTimer,
        *,
        max_model_len: int,
        clock: Callable[[], float],
        log: DecisionLog | None = None,
    ) -> None:
        """
        Args:
            tables: of the drafter's own KV, lanes as in ``texts``.
            pace: is told how long the target's passes take.
            max_model_len: longest text.
            clock: seconds.
            log: the controller's, written out after every step, as vLLM's workers end without a word.
        """
        self._texts = texts
        self._tables = tables
        self._proposers = proposers
        self._controller = controller
        self._limits = limits
        self._pace = pace
        self._max_model_len = max_model_len
        self._clock = clock
        self._log = log
        self._open: PendingStep | None = None
        self._next_step = 0
        self._needs: Needs = "all"

    def propose(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: npt.NDArray[np.integer],
        tokens: Int32,
        pass_rows: int | None = None,
    ) -> list[list[int]]:
        """Drafts for the next step, a list for each row of vLLM's batch.

        Args:
            sampled, lengths, tokens: see ``Texts.meet``.
            pass_rows: of the target's pass that has just ended; None = not known.
        """
        began_s = self._clock()
        met = self._texts.meet(sampled, lengths, tokens)
        self._settle(met, pass_rows, began_s, reading=len(sampled) - met.rows.size)
        drafts: list[list[int]] = [[] for _ in sampled]
        if met.rows.size:
            opened = self._open = self._draft(met, began_s)
            for row, made, length in zip(met.rows.tolist(), opened.drafts.tokens, opened.plan.depth, strict=True):
                drafts[row] = made[:length].tolist()
        if self._log is not None:
            self._log.flush()
        return drafts

    # --- the step that has ended --------------------------------------------------------------------------------

    def _settle(self, met: MatchedBatch, pass_rows: int | None, ended_s: float, *, reading: int) -> None:
        """Tells everybody what came of the drafts that the step has verified, and who has left or come."""
        opened, self._open = self._open, None
        new = met.before == 0
        came = None
        if opened is not None:
            came = draft_result(met, self._texts.tokens, opened.lanes, opened.drafts.tokens, opened.plan.depth)
        self._proposers.advance(_Committed(met.lanes, met.before, _accepted(met, came)))
        if opened is not None and came is not None and came.places.size:
            prefill = bool(new.any()) or reading > 0
            outcome = build_outcome(opened, came, self._texts.tokens, pass_rows, ended_s, prefill=prefill)
            if not prefill:
                self._pace.record(outcome.verify_s)
            self._controller.observe(outcome)
        for lane in met.vacated:
            self._tables.close(lane)
            self._proposers.evict(lane)
        for lane in met.lanes[new].tolist():
            self._proposers.admit(lane, (), "")  # vLLM does not tell a worker whose requests they are
        if self._proposers.needs_text:
            starts = np.where(new, met.lengths - met.brought, met.before)
            self._proposers.commit(NewText(met.lanes, self._texts.tokens, starts, met.lengths))
        if met.gone:
            self._controller.forget(met.gone)

    # --- the step to come ---------------------------------------------------------------------------------------

    def _draft(self, met: MatchedBatch, began_s: float) -> PendingStep:
        ids = self._texts.names(met.lanes.tolist())
        batch = Part(ids, met.lanes, met.lengths, self._texts.tokens, self._tables.array)
        offers = self._proposers.peek(batch) if self._needs == "all" else (None,) * len(self._limits.proposers)
        view = self._view(batch, offers)
        plan = self._controller.plan(view)
        self._needs = plan.next_needs
        plan = self._reserve(met, plan)
        drafts = self._proposers.propose(batch, plan)
        drafted = draft_view(drafts)
        trimmed = self._controller.trim(view, plan, drafted)
        kept = tuple(map(min, trimmed.depth, drafted.length))
        plan_and_drafts = plan, trimmed.with_depth(kept), drafts, drafted
        return PendingStep(view, met.lanes, *plan_and_drafts, offers, began_s=began_s, ended_s=self._clock())

    def _view(self, batch: Part, offers: tuple[Offers | None, ...]) -> StepView:
        step, self._next_step = self._next_step, self._next_step + 1
        # A step may bring one token more than it was drafted.
        room = tuple(np.maximum(self._max_model_len - 1 - batch.lengths, 0).tolist())
        everybody = len(batch.ids)
        return StepView(
            step=step,
            ids=tuple(batch.ids),
            context_len=tuple(batch.lengths.tolist()),
            room_depth=room,
            room_nodes=room,
            max_draft=(None,) * everybody,
            temperature=(0.0,) * everybody,
            lag=() if self._needs == "nothing" else self._proposers.lag(batch),
            offers=view_columns(offers),
            prefill_tokens=0,
            waiting=0,
            limits=self._limits,
        )

    def _reserve(self, met: MatchedBatch, plan: SpecPlan) -> SpecPlan:
        """The plan without those for whom the drafter's KV has no room."""
        columns = zip(met.lanes.tolist(), met.lengths.tolist(), plan.depth, strict=True)
        depth = tuple([k if k and self._tables.try_grow(lane, length + k) else 0 for lane, length, k in columns])
        return plan if depth == plan.depth else plan.with_depth(depth)


def _accepted(met: MatchedBatch, came: DraftResult | None) -> Ints:
    """[B] drafted tokens that have become text."""
    accepted = np.zeros(met.lanes.size, dtype=np.int64)
    if came is not None:
        accepted[came.met] = came.accepted
    return accepted


_KV_BYTES = 4 << 30
"""For the drafter's KV at most, on top of vLLM's own. A request that finds no room is not drafted for."""


def build_drafting(vllm_config: Any, clock: Callable[[], float]) -> Drafting:
    """
    Args:
        vllm_config: vLLM's; attributes are read.
        clock: seconds.

    Raises:
        CheckpointError, ConfigError, CapacityError: settings that are wrong, or that cannot be carried out here.
    """
    settings = _settings_of(vllm_config)
    model_config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    max_requests, max_length = scheduler.max_num_seqs, model_config.max_model_len
    vocab_size, device = model_config.get_vocab_size(), vllm_config.device_config.device_type
    dtype = "auto" if device == "cpu" else str(model_config.dtype).removeprefix("torch.")
    loaded = load_drafter(Source(settings.config, None, "vLLM's model", vocab_size, dtype, device, load_model))
    tables, arena = _kv_cache(None if loaded is None else loaded.weights, max_requests, max_length)
    sampler = SamplerState(max_requests, vocab_size, torch.device(device))
    drafter = None if loaded is None or arena is None else loaded.drafter(arena, None)
    # Certain drafts: vLLM asks others' drafters for no distributions.
    proposers = build_proposers(settings.config, drafter, tables, sampler, probabilistic=False)
    limits = limits_of(*(proposer.traits for proposer in proposers), longest=settings.longest)
    costs = PassCosts()
    if settings.config.policy == "auto":
        runners = [None if drafter is None or not one.needs.kv else drafter.runner for one in proposers]
        costs = measure_costs(None, runners, clock, scheduler.max_num_batched_tokens)
    header = header_of(model_config.model, settings.config, costs=costs, host="vllm", method="custom_class")
    controller, log = logged(build_controller(settings.config, limits, costs=costs), settings.decision_log, header)
    load_kernels()
    load_compiled()
    pace, stats = TargetPassTimer(), SpecStats()
    return Drafting(
        Texts(max_requests, max_length),
        tables,
        Router([FaultBarrier(proposer, vocab_size, stats.proposer_fault, pace, clock) for proposer in proposers]),
        controller,
        limits,
        pace,
        max_model_len=max_length,
        clock=clock,
        log=log,
    )


def limits_of(*traits: ProposerTraits, longest: int = 1) -> Limits:
    """What drafting in a worker of vLLM's can carry out: all that the embedded engine can."""
    gates = any(one.passes_per_draft == "per_token" for one in traits)
    return Limits(draft_lens=tuple(range(longest + 1)), proposers=traits, can_gate=gates)


def _settings_of(vllm_config: Any) -> DrafterSettings:
    """
    Raises:
        ConfigError: see ``DrafterSettings.read``.
    """
    parallel = vllm_config.parallel_config
    return DrafterSettings.read(
        told_in(vllm_config.additional_config),
        vllm_config.speculative_config.num_speculative_tokens,
        os.environ,
        workers=parallel.world_size,
        ranks=parallel.data_parallel_size,
    )


def _kv_cache(model: Weights | None, max_requests: int, max_length: int) -> tuple[BlockTables, Arena | None]:
    """The drafter's own. Without a model nothing is kept in the blocks, of which there are enough then."""
    blocks = max_requests * -(-(max_length + 1) // BLOCK_SIZE)
    if model is not None:
        blocks = blocks_within(_KV_BYTES, model.kv_bytes_per_block, blocks)
    tables = BlockTables(BlockPool(blocks), max_requests, max_length + 1, BLOCK_SIZE, caching=False)
    if model is None:
        return tables, None
    return tables, Arena.allocate(model.config.num_layers, model.kv_shapes(blocks), model.dtype, model.device)
