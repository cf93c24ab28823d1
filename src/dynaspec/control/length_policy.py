"""Policies that choose lengths only, and the controller that carries any of them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dynaspec.contract.step import DraftView, SpecPlan, StepOutcome, StepView, TreeRule

from .confidence import ConfidenceStop
from .planner import ChainPlanner


class LengthPolicy(Protocol):
    """How many tokens to draft, from nothing but the view and what was observed before."""

    def length(self, view: StepView) -> int:
        """The draft length of this step, the same for every request; ≥ 0."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learns from a step; may come late."""
        ...

    def estimates(self) -> Mapping[str, Any]:
        """What the lengths rest on, as plain JSON values."""
        ...


class LengthController:
    """One length a step for the whole batch, as far as rooms, wishes and host allow; with or without early stopping.

    Args:
        policy: chooses the length, which is the cap if there is a ``stop``.
        stop: ends drafts before that length.
        tree: how drafts branch, and most nodes of one; None = they are chains.
    """

    def __init__(
        self,
        policy: LengthPolicy,
        planner: ChainPlanner,
        stop: ConfidenceStop | None = None,
        tree: tuple[TreeRule, int] | None = None,
    ) -> None:
        self._policy = policy
        self._planner = planner
        self._stop = stop
        self._tree = tree

    def plan(self, view: StepView) -> SpecPlan:
        wanted = [self._policy.length(view)] * len(view.ids)
        plan = self._planner.plan(view, wanted, self._stop.rule if self._stop else None)
        if self._tree is None:
            return plan
        rule, nodes = self._tree
        return self._planner.branch(view, plan, nodes, rule)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._planner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        self._policy.observe(outcome)
        if self._stop is not None:
            self._stop.observe(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        """Nothing is kept of single requests."""

    def estimates(self) -> Mapping[str, Any]:
        threshold = {} if self._stop is None else {"draft_confidence_threshold": self._stop.threshold}
        return {**self._policy.estimates(), **threshold}
