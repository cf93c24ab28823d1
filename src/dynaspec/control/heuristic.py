"""Draft lengths that grow with success and shrink with failure, as in Transformers' assisted generation."""

from __future__ import annotations

from collections.abc import Sequence

from dynaspec.contract.step import DraftView, Ended, SpecPlan, StepOutcome, StepView

from .planner import ChainPlanner

GROWTH = 2
SHRINKAGE = 1


class HeuristicController:
    """One k a request: k + 2 after a draft that was accepted whole, else k − 1.

    The rules of ``num_assistant_tokens_schedule`` in Transformers, with what serving adds to them:

    * k stays between the host's shortest and longest draft, so that it does not wind up beyond what can run.
    * Only a draft of the full length k (rounded down to one that can run) counts as accepted whole. A shorter
      one (no room, no longer match, trimmed) is censored: it says nothing about k, and k stays. It also stays
      when the request ended inside the draft. A rejection counts at any length.
    * A request is known from its first draft until it is forgotten; outcomes that come later are ignored.

    Args:
        k: length that requests start with.
        carry_over: start a request with the k that the last finished one ended with (``heuristic``) instead
            of the configured one (``heuristic_transient``).
    """

    def __init__(self, k: int, planner: ChainPlanner, *, carry_over: bool) -> None:
        self._start = k
        self._carry_over = carry_over
        self._planner = planner
        self._k: dict[str, int] = {}

    def plan(self, view: StepView) -> SpecPlan:
        known, start = self._k, self._start
        plan = self._planner.plan(view, [known.get(request, start) for request in view.ids])
        new = [i for i, request in enumerate(view.ids) if request not in known and plan.depth[i] > 0]
        known.update((view.ids[i], start) for i in new)
        return plan

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._planner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        for request, accepted, ended in zip(outcome.ids, outcome.accepted, outcome.ended, strict=True):
            k = self._k.get(request)
            if k is not None:
                self._k[request] = self._next(k, accepted, ended)

    def forget(self, ids: Sequence[str]) -> None:
        for request in ids:
            last = self._k.pop(request, None)
            if last is not None and self._carry_over:
                self._start = last

    def _next(self, k: int, accepted: int, ended: Ended) -> int:
        if ended == "all_accepted" and accepted >= self._planner.runnable(k):
            return min(k + GROWTH, self._planner.longest)
        if ended in ("rejected", "invalid"):
            return max(k - SHRINKAGE, self._planner.shortest)
        return k
