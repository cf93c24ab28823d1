"""A constant draft length (Leviathan et al., 2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence

from dynaspec.contract.step import DraftView, SpecPlan, StepOutcome, StepView

from .planner import ChainPlanner


class ConstantController:
    """Drafts ``k`` tokens for every request in every step, as far as room and host allow."""

    def __init__(self, k: int, planner: ChainPlanner) -> None:
        self._k = k
        self._planner = planner

    def plan(self, view: StepView) -> SpecPlan:
        return self._planner.plan(view, [self._k] * len(view.ids))

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._planner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""

    def forget(self, ids: Sequence[str]) -> None:
        """Nothing was kept."""
