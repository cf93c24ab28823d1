"""Repeats a plan for some steps, where steps are so short that planning each would cost more than it brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynaspec.contract.step import DraftView, Limits, Needs, SpecPlan, StepOutcome, StepView
from dynaspec.contract.work import runs_model

from .controller import AutoController

_ALIKE = 0.1
"""Requests more or fewer, as a share, among which plain decoding stays what it is."""
_FEWER, _MORE, _PREFILL, _UNREAD = 0.5, 1.25, 4, 0.2
"""A plan that drafts holds for requests between these shares of those it was made for, with so many prefilled rows a
request, and as long as the drafter has not read the prompts of so few, as a share, that they can wait for a plan."""


class CachedPlan:
    """``auto``, whose plans hold as long as it says (``AutoController.repeatable``): not at all where steps take some
    ten milliseconds or more. A plan is made anew for other requests, and where a lookup has found something."""

    def __init__(self, inner: AutoController, limits: Limits) -> None:
        self._inner = inner
        self._ids: tuple[str, ...] = ()
        self._planned_for, self._drafts = 0, False
        self._lookups = [i for i, traits in enumerate(limits.proposers) if not runs_model(traits)]
        self._models = [i for i, traits in enumerate(limits.proposers) if runs_model(traits)]

    def plan(self, view: StepView) -> SpecPlan:
        if self._inner.repeatable > 0 and self._holds(view):
            plan = self._inner.repeat(view)
        else:
            plan = self._inner.plan(view)
            self._planned_for, self._drafts = len(view.ids), any(plan.depth)
        self._ids = view.ids
        return plan.needing(self._needs())

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._inner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        self._inner.observe(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        self._inner.forget(ids)

    def estimates(self) -> Mapping[str, Any]:
        return self._inner.estimates()

    def _holds(self, view: StepView) -> bool:
        for index, least in self._inner.least_match.items():
            if any(match >= least for match, _ in view.offers[index] or ()):
                return False
        share = len(view.ids) / max(1, self._planned_for)
        if not self._drafts:
            return abs(share - 1.0) <= _ALIKE
        if view.ids == self._ids:
            return True
        if not view.lag or not _FEWER <= share <= _MORE or view.prefill_tokens > _PREFILL * len(view.ids):
            return False
        known, most = set(self._ids), self._inner.settings.probe_context
        unread = sum(
            lag > most and request not in known for request, lag in zip(view.ids, self._lag(view), strict=True)
        )
        return unread <= _UNREAD * len(view.ids)

    def _lag(self, view: StepView) -> tuple[int, ...]:
        return tuple(map(max, zip(*(view.lag[index] for index in self._models), strict=True)))

    def _needs(self) -> Needs:
        """Of the next view: a plan that is repeated needs nothing, but others may come before that."""
        if self._lookups or not self._inner.repeatable:
            return "all"
        return "lag" if self._drafts else "nothing"
