"""Keeps a proposer's faults away from requests: they go on as plain decoding.

A fault that can be laid at a request's door (nonsense in its row) switches speculation off for that request; one that
cannot (an exception) for all that were to draft. After ``max_faults`` the proposer is switched off for good; good
drafts between make them forgotten.

A draft also has a budget: the time that the target would take to decode, for all requests side by side, what the
drafter reads and what it may bring. Drafting that takes longer cannot pay, whatever is accepted. It is late when it
takes three times its budget, and if most of the latest drafts were, that is a fault that switches the proposer off: one
alone may be the machine's doing, and its tokens are as good as any. A call that never returns cannot be ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import numpy as np

from dynaspec.contract.errors import ProposerFault
from dynaspec.contract.proposer import DecodeBatch, Drafts, NewText, Proposer, TargetStep
from dynaspec.contract.step import SpecPlan

from .check import nonsense
from .none import no_drafts
from .patience import Lateness, Strikes, TargetPace

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Fault = Literal["raised", "nonsense", "overrun"]

_FAULTS_FORGOTTEN_AFTER = 1000
"""Good drafts in a row."""
_LATE = 3.0
"""Budgets."""
_LEAST_BUDGET_S = 0.05
"""Page faults and a busy machine must not look like a slow drafter where passes take milliseconds."""
_FIRST_DRAFTS = 3
"""Drafts that are not timed: they load compiled code."""


class Guard:
    """A proposer's calls, with what they return checked."""

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        on_fault: Callable[[Fault], None],
        pace: TargetPace,
        clock: Callable[[], float],
        *,
        max_faults: int = 3,
    ) -> None:
        """
        Args:
            on_fault: called once a fault, for the metrics.
            pace: how long target passes take at present.
            clock: seconds.
            max_faults: faults, being late apart, after which nothing is drafted any more.
        """
        self.proposer = proposer
        self.enabled = True
        self._vocab_size = vocab_size
        self._on_fault = on_fault
        self._pace = pace
        self._clock = clock
        self._faults = Strikes(max_faults, _FAULTS_FORGOTTEN_AFTER)
        self._lateness = Lateness()
        self._untimed = _FIRST_DRAFTS
        self._off: set[int] = set()
        """Lanes whose request is not drafted for any more."""

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return self._call(lambda: _one_each(self.proposer.lag(batch), batch), (0,) * len(batch.ids))

    def peek(self, batch: DecodeBatch) -> tuple[tuple[int, int], ...] | None:
        def peek() -> tuple[tuple[int, int], ...] | None:
            offers = self.proposer.peek(batch)
            return None if offers is None else _one_each(offers, batch)

        return self._call(peek, None)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        """Drafts that are safe to verify."""
        plan, barred = (plan, {}) if self.enabled and not self._off else self._bar(batch, plan)
        if not any(plan.depth):
            return self._with_skipped(no_drafts(len(plan.depth)), barred)
        try:
            started = self._clock()
            drafts = self.proposer.propose(batch, plan)
            seconds = self._clock() - started
            bad = nonsense(drafts, plan, self._vocab_size)
        except Exception as error:  # whatever a proposer does, its requests go on
            self._fault("raised", "raised", error)
            self._off.update(lane for lane, depth in zip(batch.lanes.tolist(), plan.depth, strict=True) if depth)
            return self._with_skipped(no_drafts(len(plan.depth)), barred)
        if bad.any():
            self._fault("nonsense", f"returned nonsense for {', '.join(np.array(batch.ids)[bad])}")
            self._off.update(batch.lanes[bad].tolist())
            drafts.lens = np.where(bad, 0, drafts.lens)
        else:
            self._faults.good()
        self._judge_time(seconds, plan, drafts)
        return self._with_skipped(drafts, barred)

    def _judge_time(self, seconds: float, plan: SpecPlan, drafts: Drafts) -> None:
        if self._untimed:
            self._untimed -= 1
            return
        budget = self._budget(plan, drafts) if seconds > _LATE * _LEAST_BUDGET_S else None
        if self._lateness.add(budget is not None and seconds > _LATE * budget):
            self._on_fault("overrun")
            name = self.proposer.traits.name
            _log.error("the proposer %s keeps taking too long, at last %.0f ms for a draft", name, 1e3 * seconds)
            self._switch_off()

    def _budget(self, plan: SpecPlan, drafts: Drafts) -> float | None:
        """Seconds that a draft may take; None as long as the target's pace is not known."""
        pass_s = self._pace.seconds
        if pass_s is None:
            return None
        drafting = len(plan.depth) - plan.depth.count(0)
        read = drafts.rows_per_pass[0] / drafting if drafts.rows_per_pass else 0.0
        return max(_LEAST_BUDGET_S, (read + max(plan.depth)) * pass_s)

    def _bar(self, batch: DecodeBatch, plan: SpecPlan) -> tuple[SpecPlan, dict[str, str]]:
        """The plan without the requests that are not drafted for any more; those, with the reason."""
        allowed = [self.enabled and lane not in self._off for lane in batch.lanes.tolist()]
        columns = tuple(zip(batch.ids, plan.depth, allowed, strict=True))
        barred = {request: "proposer_fault" for request, depth, ok in columns if depth and not ok}
        depth, nodes = (
            tuple(k if ok else 0 for k, ok in zip(column, allowed, strict=True)) for column in (plan.depth, plan.nodes)
        )
        return plan.with_nodes(depth, nodes), barred

    def advance(self, step: TargetStep) -> None:
        self._call(lambda: self.proposer.advance(step), None)

    def commit(self, text: NewText) -> None:
        self._call(lambda: self.proposer.commit(text), None)

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        self._call(lambda: self.proposer.admit(lane, cached_blocks, cache_salt), None)

    def evict(self, lane: int) -> None:
        self._off.discard(lane)
        self._call(lambda: self.proposer.evict(lane), None)

    def _call(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Runs bookkeeping of a proposer that is still trusted; a fault in it makes its state worthless."""
        if self.enabled:
            try:
                return call()
            except Exception as error:
                self._fault("raised", "raised", error, last=True)
        return otherwise

    def _fault(self, kind: Fault, what: str, error: Exception | None = None, *, last: bool = False) -> None:
        self._on_fault(kind)
        name = self.proposer.traits.name
        _log.error("the proposer %s %s; its requests go on as plain decoding", name, what, exc_info=error)
        if self._faults.fault() or last:
            self._switch_off()

    def _switch_off(self) -> None:
        self.enabled = False
        _log.error("the proposer %s is switched off", self.proposer.traits.name)

    @staticmethod
    def _with_skipped(drafts: Drafts, barred: dict[str, str]) -> Drafts:
        drafts.skipped = {**(drafts.skipped or {}), **barred}
        return drafts


def _one_each(column: tuple[_T, ...], batch: DecodeBatch) -> tuple[_T, ...]:
    """
    Raises:
        ProposerFault: not one entry a request.
    """
    if len(column) != len(batch.ids):
        raise ProposerFault(f"a column has {len(column)} entries for {len(batch.ids)} requests; expected one each")
    return column
