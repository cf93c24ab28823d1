"""``auto``: how much to draft and to verify, per request and step, from measured cost and learnt acceptance; and plans
repeated for some steps, where these are so short that planning each would cost more than it brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.contract.costs import PassCosts, runs_model
from dynaspec.contract.signals import flat, signal_of
from dynaspec.contract.step import DraftView, Limits, Needs, SpecPlan, StepOutcome, StepView, StopRule, TreeRule
from dynaspec.control.estimate.costs import StepCosts, row_price_s, target_s
from dynaspec.control.planner import ChainPlanner
from dynaspec.control.policies.wrappers import Wrapper, plain_plan

from ..estimate.acceptance import AcceptanceModel, LaterChoices, LookupModel, RequestSlots
from ..estimate.settings import AutoSettings
from ..profile import Profile
from .candidates import Candidate, Candidates, PlanningContext
from .explore import PLAIN, Choice, Explorer, Prediction
from .learning import Learner, Planned
from .lengths import Target, admit, branch_thresholds, stop_thresholds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PENDING = 16
"""Planned steps whose outcome may still come."""
_CHANGED = 0.25
"""Share of the requests that may have come or gone since a plan was made, and of a step that reading the prompts of
those that have come may take the drafter."""


class AutoController:
    """Joint draft lengths, stop rule and verification trim, per request, and plain decoding where that is faster.

    Args:
        limits: of the host.
        longest: longest draft.
        costs: passes measured at start-up; None = learnt from the first steps.
        warm_start: a saved profile.
        settings: every number that could be another one.
        tree: most children of a node and most nodes of a draft, where drafts may branch.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        longest: int,
        tree: tuple[int, int] = (1, 1),
        costs: PassCosts | None = None,
        warm_start: Profile | None = None,
        settings: AutoSettings | None = None,
    ) -> None:
        self.settings = settings = settings or AutoSettings()
        self._limits, self._planner = limits, ChainPlanner(limits)
        self._longest = min(longest, self._planner.longest)
        costs = costs or PassCosts()
        if warm_start is not None and not costs.target:
            costs = warm_start.pass_costs()
        self.costs = StepCosts(costs, limits.proposers, settings)
        rates = warm_start.acceptance_rate_per_pos if warm_start is not None else ()
        self._models: dict[int, AcceptanceModel] = {}
        self._lookups: dict[int, LookupModel] = {}
        for index, traits in enumerate(limits.proposers):
            if runs_model(traits):
                self._models[index] = AcceptanceModel(settings, rates=rates, signal=traits.has_confidence)
            else:
                self._lookups[index] = LookupModel(settings)
        levels = np.array([k for k in limits.draft_lens if 0 < k <= self._longest], dtype=np.int64)
        self._candidates = Candidates(limits, self._models, self._lookups, self.costs, levels, settings)
        self._explorer = Explorer([runs_model(traits) for traits in limits.proposers], settings)
        self._slots = RequestSlots()
        self._later = [LaterChoices(settings) for _ in limits.proposers]
        estimators = self._models, self._lookups, self.costs
        self._learner = Learner(limits.proposers, *estimators, self._explorer, self._slots, self._later)
        # Lengths are rounded before drafting, not after: where few can run, or all must be alike, drafts are not cut.
        dense = limits.ragged and len(limits.draft_lens) == limits.draft_lens[-1] + 1
        self._can_stop, self._can_trim = limits.can_stop and dense, limits.can_trim and dense
        self._tree_width, self.most_nodes = tree
        self._price, self._advantage, self._step, self._rejected = 0.0, 1.0, 0, 0
        self._pending: dict[int, Planned] = {}
        self._worth: dict[int, float] = {}
        self.latest: Planned | None = None
        """The latest plan."""
        self.holds = 0
        """Coming steps for which it holds while the same requests run, see ``CachedPlan``."""

    def plan(self, view: StepView) -> SpecPlan:
        self._learner.learn()
        self.holds, cap = 0, self._caps(view)
        if not self._limits.proposers or not view.lag or not cap.any():
            return plain_plan(view)  # without a word about which arm pays
        at = self._context(view, cap)
        steps, self._step = max(1, view.step - self._step), view.step
        found = self._price_of_a_token(at)

        @cache
        def probe(arm: int) -> Candidate:
            model = runs_model(self._limits.proposers[arm - 1])
            return self._candidates.probe(arm - 1, self._price, at) if model else found[arm - 1]

        plans = {PLAIN: at.plain} | {1 + p: one.expected for p, one in found.items()}
        choice = self._explorer.choose(plans, steps, lambda arm: probe(arm).expected)
        plan, expected, trims = plain_plan(view), at.plain, False
        if choice.arm != PLAIN:
            candidate = probe(choice.arm) if choice.probe else found[choice.arm - 1]
            plan, expected = self._drafts(at, choice, candidate), candidate.expected
            # A tree's nodes were chosen by what they are worth, and are no chain of which the end could be left out.
            trims = not choice.probe and plan.tree is None
            trims = trims and self._worth_trimming(at.target, candidate.depth, plan.depth)
        uses = {p for p, depth in zip(plan.proposer, plan.depth, strict=True) if depth}
        if all(runs_model(self._limits.proposers[p]) for p in uses):
            step_s = expected.seconds + self.costs.prompt_s(len(view.ids), view.prefill_tokens)
            often = self.costs.planning_s / (self.settings.planning_share * step_s)
            # A plan that rests on few steps of its arm is made anew soon: it may expect too much.
            self.holds = max(0, min(self._explorer.quiet, int(often), self._explorer.measured[choice.arm]))
        planned = Planned(plan, view.ids, view.prefill_tokens, choice, expected, self._price, trims, view.offers)
        return self.note(view, planned)

    def note(self, view: StepView, planned: Planned) -> SpecPlan:
        """This is what the step will do."""
        self.latest = self._pending[view.step] = planned
        while len(self._pending) > _PENDING:
            del self._pending[next(iter(self._pending))]
        return planned.plan

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        if not any(drafts.length):
            return plan
        # Asynchronous hosts plan the next step before they trim this one: only what was noted for it counts here.
        planned, lens = self._pending.get(view.step), tuple(map(min, plan.depth, drafts.length))
        target = Target(self.costs.knots, self.costs.curve, float(len(view.ids) + view.prefill_tokens))
        if planned is None or not planned.trims:
            return self._planner.trim(view, plan, drafts)
        context = np.array(view.context_len, dtype=np.float64)
        budget, row_s = sum(lens) if plan.verify_nodes is None else plan.verify_nodes, self.costs.rest_s[2] * context
        lengths = np.array(lens, dtype=np.int64)
        survival = self._shown_survival(view, plan, drafts, lengths)
        admitted = tuple(admit(planned.price, survival, lengths, row_s, target, budget).tolist())
        return plan if admitted == plan.depth else plan.with_depth(admitted)

    def observe(self, outcome: StepOutcome) -> None:
        self._learner.add(outcome, self._pending.pop(outcome.plan_step, None))
        if outcome.plan_s and outcome.plan_step == self._step:  # not of a plan that was repeated
            self.costs.observe_planning(outcome.plan_s)
        if any(outcome.drafted):
            self._rejected = 0 if any(outcome.accepted) else self._rejected + 1
            if self._rejected > 2:
                self.holds = 0

    def forget(self, ids: Sequence[str]) -> None:
        self._learner.end(ids)

    def estimates(self) -> Mapping[str, Any]:
        """What the latest plan rested on; ``docs/explain.md`` says what each entry is."""
        latest, costs, plain = self.latest, self.costs, self._explorer.ratio(PLAIN)
        drafting = {arm: goodput for arm, goodput in self._worth.items() if arm != PLAIN}
        best = max(drafting, key=drafting.__getitem__, default=PLAIN)
        stop = latest.plan.stop if latest else None
        return {
            "mode": _mode(latest.choice) if latest else "plain",
            "expected_tokens": latest.expected.tokens if latest else 0.0,
            "expected_step_s": self._step_s(latest) if latest else 0.0,
            "plain_goodput": self._worth.get(PLAIN, 0.0),
            "draft_goodput": drafting.get(best, 0.0),
            "plain_measured_over_expected": plain,
            "draft_measured_over_expected": self._explorer.ratio(best) if drafting else 1.0,
            "token_price_s": self._price,
            "stop_below": list(stop.below) if stop else [],
            "stop_all_below": list(stop.total_below) if stop else [],
            "host_s": costs.rest_s[0],
            "speed_factor": costs.speed_factor,
            **self._explorer.document(),
            "target_curve": np.column_stack([costs.knots, costs.curve]).tolist(),
            "proposers": {
                traits.name: {**(self._models.get(i) or self._lookups[i]).document(), "cost": costs.document(i)}
                for i, traits in enumerate(self._limits.proposers)
            },
        }

    def _step_s(self, planned: Planned) -> float:
        prompt_s = self.costs.prompt_s(len(planned.ids), planned.prefill_tokens)
        return planned.expected.seconds + planned.expected.once_s + prompt_s

    # --- parts of a plan ---------------------------------------------------------------------------------------

    def _caps(self, view: StepView) -> Ints:
        cap = np.minimum(np.array(view.room_depth, dtype=np.int64), self._longest)
        if view.max_draft.count(None) < len(view.max_draft):
            cap = np.minimum(cap, [self._longest if most is None else most for most in view.max_draft])
        return cap if self._limits.ragged or not cap.size else np.full_like(cap, cap.min())

    def _context(self, view: StepView, cap: Ints) -> PlanningContext:
        slots = self._slots.of(view.ids)
        for i in np.flatnonzero(slots < 0).tolist():
            slots[i] = self._slots.add(view.ids[i])
            for estimator in chain[AcceptanceModel | LookupModel](self._models.values(), self._lookups.values()):
                estimator.admit(int(slots[i]), view.expected_acceptance[i] if view.expected_acceptance else None)
        context, seen = np.array(view.context_len, dtype=np.float64), float(sum(view.context_len))
        requests = len(view.ids)
        plain = Prediction(float(cap.size), self.costs.target_s(float(requests), seen, seen))
        target = Target(self.costs.knots, self.costs.curve, float(requests + view.prefill_tokens))
        room = np.array(view.room_depth, dtype=np.float64)
        return PlanningContext(view, slots, cap, room, self.costs.rest_s[2] * context, target, plain)

    def _price_of_a_token(self, at: PlanningContext) -> dict[int, Candidate]:
        """Also what each proposer would draft at that price, from the latest advantage over plain decoding on."""
        explorer = self._explorer
        explorer.meet(at.cap.size)
        plain = at.plain.goodput * explorer.ratio(PLAIN)
        found = self._candidates.of(1.0 / (self._advantage * plain), at)
        self._worth = {PLAIN: plain}
        self._worth |= {1 + p: one.expected.goodput * explorer.ratio(1 + p) for p, one in found.items()}
        best = max([plain, *(one.priced.goodput * explorer.ratio(1 + p) for p, one in found.items())])
        self._advantage, self._price = best / plain, 1.0 / best
        return found

    def _drafts(self, at: PlanningContext, choice: Choice, candidate: Candidate) -> SpecPlan:
        depth, stop, index = candidate.depth, None, choice.arm - 1
        traits, mine = self._limits.proposers[index], (candidate.owner == index) & (depth > 0)
        rule = self._tree_rule(at, index, int(np.count_nonzero(mine))) if not candidate.probe_context else None
        per_token = traits.passes_per_draft == "per_token"
        if self._can_stop and traits.has_confidence and (per_token or rule is not None):
            price = self._price * (self.settings.probe_price if choice.probe else 1.0)
            stop = self._stop_rule(price, at, index, np.where(mine, depth, 0))
            if not choice.probe:  # the rule ends drafts by what they turn out to be: the expected length is no limit
                end = next((done for done, below in enumerate(stop.below, 1) if below >= 1.0), self._longest)
                depth = np.where(mine, np.minimum(at.cap, end), depth)
        owner = tuple(candidate.owner.tolist())
        plan = self._planner.plan(at.view, depth.tolist(), stop, owner, candidate.probe_context)
        return plan if rule is None or stop is None else self._planner.branch(at.view, plan, self.most_nodes, rule)

    def _tree_rule(self, at: PlanningContext, index: int, drafting: int) -> TreeRule | None:
        """Branches where a second choice could pay for its row behind the first: its chance is less than a half."""
        traits = self._limits.proposers[index]
        # Lookups draft chains here: their acceptance is learnt from the length of the match alone.
        if self._tree_width == 1 or not traits.trees or not runs_model(traits) or not drafting:
            return None
        row_s = self.costs.draft_terms(index)[2] + float(at.seen_s.sum()) / at.cap.size
        below = branch_thresholds(self._price, row_s, at.target, drafting, self.most_nodes)
        rule = TreeRule(self._tree_width, tuple(below.tolist()), later=self._later[index].ratio)
        return rule if below[1] < 0.5 else None

    def _stop_rule(self, price: float, at: PlanningContext, index: int, depth: Ints) -> StopRule:
        model, (_, pass_s, row_s, _) = self._models[index], self.costs.draft_terms(index)
        if self._limits.proposers[index].passes_per_draft == "one":
            pass_s = 0.0  # of a tree: it has been run
        biases, (gamma, weight, shift) = model.biases(), model.head.tolist()
        row_s += float(at.seen_s.sum()) / at.cap.size
        below, together = stop_thresholds(price, biases, row_s, pass_s, at.target, depth, int(at.cap.max()))
        bias, offset = (gamma * biases + shift).tolist(), (gamma * model.offsets(at.slots)).tolist()
        columns = (tuple(bias), tuple(offset), tuple(together.tolist()))
        return StopRule(tuple(below.tolist()), "request", "survival", weight, *columns)

    def _worth_trimming(self, target: Target, expected: Ints, depth: Sequence[int]) -> bool:
        """Whether looking at drafts saves more than it takes: the last row of each, and what rows cost more where they
        are longer than expected. Decided before drafting, as no token may decide whether it is looked at."""
        knots, curve, rows = target
        rows += float(expected.sum())
        drafting, more = float(np.count_nonzero(expected)), target.rows + sum(depth) - rows
        row_s = row_price_s(knots, curve, rows, max(drafting, 1.0))
        dearer_s = target_s(knots, curve, rows + more) - target_s(knots, curve, rows) - more * row_s
        return self._can_trim and bool(drafting * row_s + dearer_s > self.settings.planning_s)

    def _shown_survival(self, view: StepView, plan: SpecPlan, drafts: DraftView, lens: Ints) -> Floats:
        """[B, longest] chances that each drafted token and all before it are accepted."""
        slots, lengths, longest = self._slots.of(view.ids), lens.tolist(), int(lens.max(initial=0))
        signal, bonus = signal_of(drafts.signal, drafts.confidence, lengths), np.zeros(0)
        if drafts.repeat_bonus:
            bonus = flat(drafts.repeat_bonus, lengths)
        survival = np.zeros((lens.size, longest))
        for index in set(plan.proposer):
            mine = np.array(plan.proposer) == index
            if index in self._models:
                found = self._models[index].survival(slots, lens, longest, signal, bonus)
            else:
                match = np.array([match for match, _ in view.offers[index] or ((1, 1),) * lens.size])
                found = self._lookups[index].survival(slots, match, lens, longest)
            survival[mine] = found[mine]
        return survival


def _mode(choice: Choice) -> str:
    name = "plain" if choice.arm == PLAIN else "draft" if choice.probe else "speculate"
    return f"probe_{name}" if choice.probe else name


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
