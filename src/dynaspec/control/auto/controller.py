"""``auto``: how much to draft and to verify, per request and step, from measured cost and learnt acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.signals import flat, signal_of
from dynaspec.contract.step import DraftView, Limits, SpecPlan, StepOutcome, StepView, StopRule
from dynaspec.contract.work import runs_model

from ..estimate.acceptance import AcceptanceModel, RequestSlots
from ..estimate.costs import StepCosts
from ..plain import plain_plan
from ..planner import ChainPlanner
from ..profile import Profile
from .candidates import Candidate, Candidates, Situation
from .explore import PLAIN, Choice, Explorer, Prediction
from .learning import Learner, Planned, offered
from .lengths import Target, admit, stop_thresholds
from .settings import AutoSettings

Ints = npt.NDArray[np.int64]

_PENDING = 16
"""Planned steps whose outcome may still come."""
_ROUNDS, _SAME = 2, 0.1
"""Times that lengths and the token price are fitted to each other, from the last advantage over plain decoding on;
and the share by which they may differ."""
_PLANNING_S, _LONGEST_REPEAT = 5e-4, 32
"""What planning takes within a step, about, on a server's CPU; and steps for which a plan is repeated at most."""
_WORTH_TRIMMING = 0.3
"""Share of a plain step that a last row of each draft must take for drafts to be looked at before they are verified."""


class AutoController:
    """Joint draft lengths, stop rule and verification trim, per request, and plain decoding where that is faster.

    Args:
        limits: of the host.
        longest: longest draft.
        costs: passes measured at start-up; None = learnt from the first steps.
        warm_start: a saved profile.
        settings: every number that could be another one.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        longest: int,
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
        self._costs = StepCosts(costs, limits.proposers, settings.costs)
        rates = warm_start.acceptance_rate_per_pos if warm_start is not None else ()
        self._models = [
            AcceptanceModel(settings.acceptance, rates=rates, signal=traits.has_confidence)
            if runs_model(traits)
            else AcceptanceModel.of_lookup(settings.acceptance, rates)
            for traits in limits.proposers
        ]
        self._drafters = [p for p, traits in enumerate(limits.proposers) if runs_model(traits)]
        levels = np.array([k for k in limits.draft_lens if 0 < k <= self._longest], dtype=np.int64)
        self._candidates = Candidates(limits, self._models, self._costs, levels, settings)
        self._explorer = Explorer([runs_model(traits) for traits in limits.proposers], settings)
        self._slots = RequestSlots()
        self._learner = Learner(limits.proposers, self._models, self._costs, self._explorer, self._slots)
        # Lengths are rounded before drafting, not after: where few can run, or all must be alike, drafts are not cut.
        dense = limits.ragged and len(limits.draft_lens) == limits.draft_lens[-1] + 1
        self._can_stop, self._can_trim = limits.can_stop and dense, limits.can_trim and dense
        self._price, self._advantage, self._step, self._rejected = 0.0, 1.0, 0, 0
        self._pending: dict[int, Planned] = {}
        self._latest: Planned | None = None
        self._worth: dict[int, float] = {}
        self.least_match: dict[int, int] = {}
        """By lookup, the shortest match for which the latest plan is made anew."""
        self.repeatable = 0
        """Coming steps of the same requests for which the latest plan holds, see ``CachedPlan``."""

    def plan(self, view: StepView) -> SpecPlan:
        self._learner.learn()
        self.repeatable, cap = 0, self._caps(view)
        if not self._limits.proposers or not view.lag or not cap.any():
            return plain_plan(view)  # without a word about which arm pays
        at = self._situation(view, cap)
        steps, self._step = max(1, view.step - self._step), view.step
        found = self._draft_candidates(at)
        probing = found | (
            self._candidates.of(self._price, at, probe=True) if self._explorer.may_probe(self._drafters) else {}
        )
        choice = self._explorer.choose(
            {PLAIN: at.plain} | {1 + p: one.long_run for p, one in found.items()},
            {PLAIN: at.plain} | {1 + p: one.settled for p, one in probing.items()},
            {1 + p: one.reading_s for p, one in probing.items()},
            steps,
        )
        plan, expected, settled = plain_plan(view), at.plain, at.plain
        if choice.arm != PLAIN:
            candidate = (probing if choice.probe else found)[choice.arm - 1]
            plan = self._drafting_plan(at, choice, candidate)
            expected, settled = candidate.step, candidate.settled
        self.least_match = self._least_matches(at, choice, found)
        looked_up = any(
            k and not runs_model(self._limits.proposers[p]) for p, k in zip(plan.proposer, plan.depth, strict=True)
        )
        if not choice.probe and not looked_up:
            often = int(_PLANNING_S / (self.settings.planning_share * expected.seconds))
            self.repeatable = max(0, min(self._explorer.quiet, often, _LONGEST_REPEAT))
        planned = Planned(plan, view.ids, choice, expected, self._price, at.plain.seconds, view.offers)
        self._note(view, planned)
        self._latest = replace(planned, expected=settled)  # what the drafter lacks is read once
        return plan

    def repeat(self, view: StepView) -> SpecPlan:
        """The latest plan once more, see ``CachedPlan``. Requests that have come meanwhile get what most others have,
        if the drafter has read nearly all of them."""
        self.repeatable -= 1
        planned = self._latest
        if planned is None or not any(planned.plan.depth):
            return self._note(view, replace(planned, plan=plain_plan(view))) if planned else plain_plan(view)
        plan = planned.plan
        if view.ids == planned.ids:
            self._note(view, planned)
        else:
            place = {request: i for i, request in enumerate(planned.ids)}
            index, old = plan.proposer[0], [place.get(request, -1) for request in view.ids]
            usual = max(set(plan.depth) - {0}, key=plan.depth.count)
            offset = plan.stop.offset if plan.stop else ()
            plan = SpecPlan(
                step=view.step,
                depth=tuple(
                    plan.depth[i] if i >= 0 else usual * (lag <= self.settings.probe_context)
                    for i, lag in zip(old, view.lag[index], strict=True)
                ),
                proposer=(index,) * len(old),
                nodes=(),
                stop=plan.stop and plan.stop.with_offset(tuple(offset[i] if i >= 0 else 0.0 for i in old)),
                verify_nodes=plan.verify_nodes,
            )
            share, rows = len(view.ids) / len(planned.ids), float(len(planned.ids)) + planned.expected.tokens
            more_s = self._costs.target_s(rows * share, 0.0, 0.0) - self._costs.target_s(rows, 0.0, 0.0)
            expected = Prediction(planned.expected.tokens * share, max(planned.expected.seconds + more_s, 1e-9))
            self._note(view, replace(planned, plan=plan, ids=view.ids, expected=expected))
        return plan.at(view.step, tuple(map(min, plan.depth, view.room_depth)))

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        # Asynchronous hosts plan the next step before they trim this one: only what was noted for it counts here.
        planned, lens = self._pending.get(view.step), tuple(map(min, plan.depth, drafts.length))
        rows, drafting = len(view.ids) + view.prefill_tokens + sum(lens), sum(n > 0 for n in lens)
        seen = drafting * max(view.context_len, default=0)
        last_s = self._costs.target_s(rows, 0.0, seen) - self._costs.target_s(rows - drafting, 0.0, 0.0)
        if planned is None or not self._can_trim or last_s <= _WORTH_TRIMMING * planned.plain_s:
            return self._planner.trim(view, plan, drafts)
        row_s = self._costs.seen_s * np.array(view.context_len, dtype=np.float64)
        target = Target(self._costs.knots, self._costs.curve, float(rows - sum(lens)))
        budget = sum(lens) if plan.verify_nodes is None else plan.verify_nodes
        survival = self._survival(view, plan, drafts, lens)
        depth = admit(planned.price, survival, np.array(lens, dtype=np.int64), row_s, target, budget)
        admitted = tuple(depth.tolist())
        return plan if admitted == plan.depth else plan.with_depth(admitted)

    def observe(self, outcome: StepOutcome) -> None:
        self._learner.add(outcome, self._pending.pop(outcome.plan_step, None))
        if any(outcome.drafted):
            self._rejected = 0 if any(outcome.accepted) else self._rejected + 1
            if self._rejected > 1:
                self.repeatable = 0

    def forget(self, ids: Sequence[str]) -> None:
        self._learner.end(ids)

    def estimates(self) -> Mapping[str, Any]:
        """What the latest plan rested on; ``docs/explain.md`` says what each entry is."""
        latest, costs, plain = self._latest, self._costs, self._explorer.ratio(PLAIN)
        drafting = {arm: goodput for arm, goodput in self._worth.items() if arm != PLAIN}
        best = max(drafting, key=drafting.__getitem__, default=PLAIN)
        stop = latest.plan.stop if latest else None
        return {
            "mode": _mode(latest.choice) if latest else "plain",
            "expected_tokens": latest.expected.tokens if latest else 0.0,
            "expected_step_s": latest.expected.seconds if latest else 0.0,
            "plain_goodput": self._worth.get(PLAIN, 0.0),
            "draft_goodput": drafting.get(best, 0.0),
            "plain_measured_over_expected": plain,
            "draft_measured_over_expected": self._explorer.ratio(best) if drafting else 1.0,
            "token_price_s": self._price,
            "stop_below": list(stop.below) if stop else [],
            "stop_all_below": list(stop.total_below) if stop else [],
            "host_s": costs.host_s,
            "speed_factor": costs.speed_factor,
            **self._explorer.document(),
            "target_curve": np.column_stack([costs.knots, costs.curve]).tolist(),
            "proposers": {
                traits.name: {**model.document(), "cost": costs.document(i)}
                for i, (traits, model) in enumerate(zip(self._limits.proposers, self._models, strict=True))
            },
        }

    # --- parts of a plan ---------------------------------------------------------------------------------------

    def _caps(self, view: StepView) -> Ints:
        cap = np.minimum(np.array(view.room_depth, dtype=np.int64), self._longest)
        if view.max_draft.count(None) < len(view.max_draft):
            cap = np.minimum(cap, [self._longest if most is None else most for most in view.max_draft])
        return cap if self._limits.ragged or not cap.size else np.full_like(cap, cap.min())

    def _situation(self, view: StepView, cap: Ints) -> Situation:
        slots, new = self._slots.take(view.ids)
        for model in self._models if new else ():
            model.grow(self._slots.size)
            for i in new:
                model.admit(int(slots[i]), view.expected_acceptance[i] if view.expected_acceptance else None)
        context, rows = np.array(view.context_len, dtype=np.float64), float(len(view.ids) + view.prefill_tokens)
        seconds = self._costs.target_s(rows, read=float(context.sum()), seen=float(context.sum()))
        target = Target(self._costs.knots, self._costs.curve, rows)
        return Situation(view, slots, cap, context, target, Prediction(float(cap.size), seconds))

    def _draft_candidates(self, at: Situation) -> dict[int, Candidate]:
        """What each proposer would draft, at the token price that follows from it."""
        explorer = self._explorer
        explorer.meet(at.cap.size)
        plain = at.plain.goodput * explorer.ratio(PLAIN)
        for _ in range(_ROUNDS):
            before = self._price = 1.0 / (self._advantage * plain)
            found = self._candidates.of(before, at)
            self._worth = {PLAIN: plain}
            self._worth |= {1 + p: one.long_run.goodput * explorer.ratio(1 + p) for p, one in found.items()}
            priced = [one.priced.goodput * explorer.ratio(1 + p) for p, one in found.items()]
            self._advantage = max([plain, *priced]) / plain
            self._price = 1.0 / (self._advantage * plain)
            if abs(self._price / before - 1.0) < _SAME:
                break
        return found

    def _drafting_plan(self, at: Situation, choice: Choice, candidate: Candidate) -> SpecPlan:
        depth, stop, index = candidate.depth, None, choice.arm - 1
        traits, mine = self._limits.proposers[index], (candidate.owner == choice.arm - 1) & (candidate.depth > 0)
        if self._can_stop and traits.has_confidence and traits.passes_per_draft == "per_token":
            stop = self._stop_rule(at, index, np.where(mine, depth, 0))
            if not choice.probe:  # the rule ends drafts by what they turn out to be: the expected length is no limit
                end = next((done for done, below in enumerate(stop.below, 1) if below >= 1.0), self._longest)
                depth = np.where(mine, np.minimum(at.cap, end), depth)
        plan = self._planner.plan(at.view, depth.tolist(), stop, tuple(candidate.owner.tolist()))
        return replace(plan, probe_context=candidate.probe_context) if candidate.probe_context else plan

    def _stop_rule(self, at: Situation, index: int, depth: Ints) -> StopRule:
        model, (_, pass_s, row_s, _) = self._models[index], self._costs.draft_terms(index)
        biases, (gamma, weight, shift) = model.biases(), model.head.tolist()
        row_s += self._costs.seen_s * float(at.context.mean())
        below, together = stop_thresholds(self._price, biases, row_s, pass_s, at.target, depth, int(at.cap.max()))
        return StopRule(
            below=tuple(below.tolist()),
            total_below=tuple(together.tolist()),
            scope="request",
            signal="survival",
            weight=weight,
            bias=tuple((gamma * biases + shift).tolist()),
            offset=tuple((gamma * model.offsets(at.slots)).tolist()),
        )

    def _least_matches(self, at: Situation, choice: Choice, found: Mapping[int, Candidate]) -> dict[int, int]:
        """By lookup, the shortest match that is worth a plan of its own."""
        instead_s, drafter = 0.0, choice.arm - 1
        if choice.arm != PLAIN and drafter in found and runs_model(self._limits.proposers[drafter]):
            more = found[drafter].settled.tokens - at.plain.tokens
            instead_s = more * self._price - (found[drafter].settled.seconds - at.plain.seconds)
        return {
            index: self._candidates.least_match(index, self._price, at, instead_s / at.cap.size + _PLANNING_S)
            for index, traits in enumerate(self._limits.proposers)
            if not runs_model(traits)
        }

    def _survival(
        self, view: StepView, plan: SpecPlan, drafts: DraftView, lens: tuple[int, ...]
    ) -> npt.NDArray[np.float64]:
        """[N] chances that each drafted token and all before it are accepted."""
        slots, lengths, owner = self._slots.find(view.ids), np.array(lens, dtype=np.int64), np.array(plan.proposer)
        signal, bonus = signal_of(drafts.signal, drafts.confidence, lens), flat(drafts.repeat_bonus, lens)
        survival, owners = np.zeros(signal.size), np.repeat(owner, lengths)
        for index in set(owners.tolist()):
            mine, tokens = owner == index, owners == index
            own, extra = signal[tokens], bonus[tokens]
            if not runs_model(self._limits.proposers[index]):
                own, extra = offered(view.offers[index], lens)[tokens], np.zeros_like(own)
            survival[tokens] = self._models[index].shown_survival(slots[mine], own, extra, lengths[mine])
        return survival

    def _note(self, view: StepView, planned: Planned) -> SpecPlan:
        self._latest = self._pending[view.step] = planned
        while len(self._pending) > _PENDING:
            del self._pending[next(iter(self._pending))]
        return planned.plan


def _mode(choice: Choice) -> str:
    name = "plain" if choice.arm == PLAIN else "draft" if choice.probe else "speculate"
    return f"probe_{name}" if choice.probe else name
