"""One step of the engine. Only this file knows all the parts.

schedule   who runs, how much to draft, which KV blocks          ┐ may run while the step
run        draft, trim, verify                                   │ before is still running
commit     tokens become output, the controller learns           ┘ (``async_scheduling``)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from dynaspec.contract.proposer import NewText
from dynaspec.contract.step import Controller, Limits, Needs
from dynaspec.observe.stats import SpecStats
from dynaspec.propose.guard import TargetPassTimer
from dynaspec.propose.router import Router, draft_view
from dynaspec.sampling.state import SamplerState
from dynaspec.schedule.batch import Committed, StepBatch
from dynaspec.schedule.request import Request
from dynaspec.schedule.scheduler import Scheduler

from .outcome import ExecutedStep, ScheduledStep, build_outcome, build_view, why_off
from .target import TargetVerifier


class Step:
    """The story of a step in three acts."""

    def __init__(
        self,
        scheduler: Scheduler,
        controller: Controller,
        proposer: Router,
        verifier: TargetVerifier,
        sampler: SamplerState,
        limits: Limits,
        stats: SpecStats,
        pace: TargetPassTimer,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._controller = controller
        self._proposer = proposer
        self._verifier = verifier
        self._sampler = sampler
        self._limits = limits
        self._stats = stats
        self._pace = pace
        self._clock = clock
        self._last_end = 0.0
        self._needs: Needs = "all"
        self._no_offers = (None,) * len(limits.proposers)

    def schedule(self) -> ScheduledStep | None:
        """Plans the next step; None if nobody could run."""
        began = self._clock()
        batch = self._scheduler.next_batch()
        if batch.empty:
            return None
        lag = () if self._needs == "nothing" else self._proposer.lag(batch)
        offers = self._proposer.peek(batch) if self._needs == "all" else self._no_offers
        view = build_view(batch, self._limits, lag, offers)
        asked = self._clock()
        plan = self._controller.plan(view)
        plan_s = self._clock() - asked
        self._needs = plan.next_needs
        batch.skipped = why_off(view, plan)
        plan = self._scheduler.reserve(batch, plan)
        return ScheduledStep(batch, view, plan, began, plan_s, offers)

    def settle(self, scheduled: ScheduledStep) -> ScheduledStep | None:
        """Brings a step that was planned ahead up to date; None if all its requests have left."""
        keep = self._scheduler.settle(scheduled.batch)
        if scheduled.batch.empty:
            self.discard(scheduled)
            return None
        if keep is not None:
            scheduled.view, scheduled.plan = scheduled.view.select(keep), scheduled.plan.select(keep)
            scheduled.offers = tuple(None if one is None else one.select(keep) for one in scheduled.offers)
        return scheduled

    def discard(self, scheduled: ScheduledStep) -> None:
        """Gives up a step that was not committed; its requests stay, and are recomputed."""
        self._scheduler.discard(scheduled.batch)

    def run(self, scheduled: ScheduledStep) -> ExecutedStep:
        """Drafts and verifies. Touches tensors, but no queue and no request."""
        batch, started = scheduled.batch, self._clock()
        self._take_lanes(batch)
        drafts = self._proposer.propose(batch, scheduled.plan)
        drafted = draft_view(drafts)
        plan = self._controller.trim(scheduled.view, scheduled.plan, drafted)
        between = self._clock()
        verified = self._verifier.verify(batch, drafts, plan)
        self._proposer.advance(verified.target)
        ended = self._clock()
        if not verified.prefill_rows:
            self._pace.record(ended - between)
        return ExecutedStep(scheduled, drafts, drafted, plan, verified, between - started, ended - between)

    def commit(self, ran: ExecutedStep) -> list[Request]:
        """Makes the tokens output; returns the requests that got any, or ended."""
        batch = ran.scheduled.batch
        committed = self._scheduler.commit(batch, ran.verified.result)
        touched = self._follow(batch, committed)
        now = self._clock()
        began, ahead = ran.scheduled.began_s, ran.scheduled.began_s < self._last_end
        step_s, plan_s = now - max(began, self._last_end), 0.0 if ahead else ran.scheduled.plan_s
        # A step that was planned ahead looked for offers before the text that it goes on from was there.
        offers = () if ahead else ran.scheduled.offers
        outcome = build_outcome(ran, committed, offers, step_s=step_s, plan_s=plan_s)
        self._last_end = now
        self._controller.observe(outcome)
        self._stats.record(outcome)
        if batch.skipped:
            self._stats.skip(batch.skipped)
        if ran.drafts.skipped:
            self._stats.skip(Counter(ran.drafts.skipped.values()))
        finished = [request.id for request in touched if request.finished]
        if finished or committed.aborted:
            self._controller.forget(list(dict.fromkeys((*committed.aborted, *finished))))
        return touched

    def _follow(self, batch: StepBatch, committed: Committed) -> list[Request]:
        """Tells sampler and proposers what became output; returns all requests that got something."""
        chunks = [chunk for chunk in batch.chunks if chunk.completes]
        requests = [*batch.requests, *(chunk.request for chunk in chunks)]
        lanes = [*batch.lanes.tolist(), *(chunk.lane for chunk in chunks)]
        emitted = [*committed.emitted.tolist(), *(1 for _ in chunks)]
        for request, lane, count in zip(requests, lanes, emitted, strict=True):
            if request.lane == lane:
                self._sampler.commit(lane, request.output[-count:])
        if self._proposer.needs_text:
            ends = np.array([request.length for request in requests], dtype=np.int64)
            starts = ends - np.array(emitted, dtype=np.int64)
            self._proposer.commit(NewText(np.array(lanes, dtype=np.int64), batch.tokens, starts, ends))
        return requests

    def _take_lanes(self, batch: StepBatch) -> None:
        """Lanes that changed hands get their new request's sampling state."""
        for lane in batch.vacated:
            self._sampler.remove(lane)
            self._proposer.evict(lane)
        for admission in batch.admitted:
            request = admission.request
            self._sampler.add(
                admission.lane,
                request.params,
                seed=request.seed,
                n_index=request.n_index,
                eos_token_ids=request.eos_ids,
                bad_words=request.bad_words,
                prompt=request.prompt.tolist(),
                output=request.output,
                grammar=request.grammar,
            )
            self._proposer.admit(admission.lane, admission.cached_blocks, request.cache_salt)
