"""Repeats a plan for some steps, where steps are so short that planning each would cost more than it brings."""

from __future__ import annotations

from dataclasses import replace

from dynaspec.contract.costs import runs_model
from dynaspec.contract.step import Limits, Needs, SpecPlan, StepView
from dynaspec.control.planner import ChainPlanner
from dynaspec.control.policies.wrappers import Wrapper

from .controller import AutoController
from .learning import Planned

_CHANGED = 0.25
"""Share of the requests that may have come or gone since a plan was made, and of a step that reading the prompts of
those that have come may take the drafter."""


class CachedPlan(Wrapper[AutoController]):
    """``auto``, whose plans hold as long as it says (``AutoController.holds``): few steps where these are long. A plan
    is made anew for other requests, and where a lookup has found something longer than what was not worth it."""

    def __init__(self, inner: AutoController, limits: Limits) -> None:
        super().__init__(inner)
        self._planner = ChainPlanner(limits)
        self._made_for: frozenset[str] = frozenset()
        self._lookups = [i for i, traits in enumerate(limits.proposers) if not runs_model(traits)]
        self._passed_over = [0] * len(limits.proposers)
        """Longest match of each lookup that was not worth a draft."""

    def plan(self, view: StepView) -> SpecPlan:
        latest = self._inner.latest
        if self._inner.holds > 0 and latest is not None and self._still_holds(view, latest):
            self._inner.holds -= 1
            latest = self._repeated(view, latest)
            self._inner.note(view, latest)
            plan = self._at(view, latest.plan)
        else:
            plan = self._inner.plan(view)
            self._made_for = frozenset(view.ids)
            latest = self._inner.latest
            for index in self._lookups if latest is not None and not latest.choice.probe else ():
                self._learn_match(index, view, plan)
        if self._lookups or self._inner.holds <= 0:
            return plan
        needs: Needs = "lag" if any(plan.depth) else "nothing"
        return plan.needing(needs)

    def _at(self, view: StepView, plan: SpecPlan) -> SpecPlan:
        """A plan for these requests, as they are now."""
        if not any(plan.depth):
            return plan.at(view.step)
        found = self._planner.plan(view, plan.depth, plan.stop, plan.proposer, plan.probe_context)
        return found if plan.tree is None else self._planner.branch(view, found, self._inner.most_nodes, plan.tree)

    def _learn_match(self, index: int, view: StepView, plan: SpecPlan) -> None:
        """Longer matches than those that a plan made nothing of are worth a plan of their own."""
        match = [match for match, _ in view.offers[index] or ()]
        used = [m for m, p, depth in zip(match, plan.proposer, plan.depth, strict=False) if depth and p == index]
        passed_over = self._passed_over[index]
        self._passed_over[index] = min(passed_over, min(used) - 1) if used else max(passed_over, *match, 0)

    def _still_holds(self, view: StepView, latest: Planned) -> bool:
        for index in self._lookups:
            if any(match > self._passed_over[index] for match, _ in view.offers[index] or ()):
                return False
        if view.ids == latest.ids:
            return True
        most = _CHANGED * len(self._made_for)
        if not any(latest.plan.depth):
            return abs(len(view.ids) - len(self._made_for)) <= most
        come = sum(request not in self._made_for for request in view.ids)
        gone = len(self._made_for) + come - len(view.ids)
        return (
            bool(view.lag)
            and max(come, gone) <= most
            and self._reading_s(view, latest) <= _CHANGED * latest.expected.seconds
        )

    def _reading_s(self, view: StepView, latest: Planned) -> float:
        """Seconds in which the drafter reads the prompts of requests that have come."""
        index, known = latest.choice.arm - 1, set(latest.ids)
        lag = sum(lag for request, lag in zip(view.ids, view.lag[index], strict=True) if request not in known)
        return lag * self._inner.costs.draft_terms(index)[3]

    def _repeated(self, view: StepView, latest: Planned) -> Planned:
        """The same for the requests that run now; those that have come get what most others have."""
        if view.ids == latest.ids and view.prefill_tokens == latest.prefill_tokens:
            return replace(latest, expected=latest.expected._replace(once_s=0.0)) if latest.expected.once_s else latest
        plan, expected = latest.plan, latest.expected
        place = {request: i for i, request in enumerate(latest.ids)}
        old, usual = [place.get(request, -1) for request in view.ids], max(set(plan.depth), key=plan.depth.count)
        depth = tuple([plan.depth[i] if i >= 0 else usual for i in old])
        rows, share, costs = len(place) + sum(plan.depth), len(old) / len(place), self._inner.costs
        slower = costs.target_s(rows * share, 0.0, 0.0) / costs.target_s(rows, 0.0, 0.0)
        once_s = self._reading_s(view, latest) if any(depth) else 0.0
        stop = plan.stop and plan.stop.with_offset(tuple([plan.stop.offset[i] if i >= 0 else 0.0 for i in old]))
        proposer, context = plan.proposer[:1] * len(old), plan.probe_context
        plan = SpecPlan(view.step, depth, proposer, depth, stop, probe_context=context, tree=plan.tree)
        expected = expected._replace(tokens=expected.tokens * share, seconds=expected.seconds * slower, once_s=once_s)
        return replace(latest, plan=plan, ids=view.ids, prefill_tokens=view.prefill_tokens, expected=expected)
