"""Dynamic speculation lengths: drafting stops when the drafter is no longer confident.

The stop after each drafter pass is that of DISCO (Mamou et al., 2405.04304) in the simple form that
Transformers' assisted generation uses: a threshold on a probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dynaspec.contract.step import DraftView, Scope, Signal, SpecPlan, StepOutcome, StepView, StopRule

from .planner import ChainPlanner
from .threshold import FittedThreshold


class ConfidenceController:
    """Drafts up to ``k`` tokens, and stops after one whose confidence is below the threshold.

    Args:
        k: longest draft.
        threshold: in 0 … 1; 0 = never stop; ``auto`` = fitted to what is accepted.
        scope: each request stops by itself, or all do when the mean over those still drafting is below.
        signal: which probability is compared, see ``StopRule``.
    """

    def __init__(
        self,
        k: int,
        planner: ChainPlanner,
        *,
        threshold: float | Literal["auto"],
        scope: Scope,
        signal: Signal,
    ) -> None:
        self._k = k
        self._planner = planner
        self._fit = FittedThreshold() if threshold == "auto" else None
        self._scope: Scope = scope
        self._signal: Signal = signal
        self._stop = self._rule(self._fit.value if self._fit else float(threshold))

    def plan(self, view: StepView) -> SpecPlan:
        return self._planner.plan(view, [self._k] * len(view.ids), self._stop)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._planner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        if self._fit is None:
            return
        before = self._fit.value
        self._fit.observe(outcome)
        if self._fit.value != before:
            self._stop = self._rule(self._fit.value)

    def forget(self, ids: Sequence[str]) -> None:
        """Nothing is kept of single requests."""

    def _rule(self, threshold: float) -> StopRule | None:
        if threshold == 0.0:
            return None
        return StopRule(below=(threshold,) * self._k, scope=self._scope, signal=self._signal)
