"""Plain decoding: nothing is ever drafted."""

from __future__ import annotations

from collections.abc import Sequence

from dynaspec.contract.step import DraftView, Needs, SpecPlan, StepOutcome, StepView


def plain_plan(view: StepView, *, next_needs: Needs = "all") -> SpecPlan:
    """A plan with draft length 0 for every request."""
    zeros = (0,) * len(view.ids)
    return SpecPlan(step=view.step, depth=zeros, proposer=zeros, nodes=zeros, next_needs=next_needs)


class PlainController:
    """k = 0: the engine without speculation."""

    def plan(self, view: StepView) -> SpecPlan:
        return plain_plan(view)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""

    def forget(self, ids: Sequence[str]) -> None:
        """Nothing was kept."""
