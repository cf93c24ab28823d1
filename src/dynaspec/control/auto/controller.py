"""``auto``: how much to draft and to verify, per request and step, from measured cost and learnt acceptance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import DraftView, Limits, SpecPlan, StepOutcome, StepView, StopRule

from ..plain import plain_plan
from ..planner import ChainPlanner
from ..profile import Profile
from .acceptance import Places
from .agreement import Agreement, Pending
from .curve import KNOTS, CostCurve, saved_curve
from .drafter import Drafter, LookupDrafter, ModelDrafter, Situation, Wish
from .guard import Mode, PlainGuard, Prediction
from .lengths import admit_by_survival

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_HOST_FORGET = 0.9
_PENDING = 16
"""Planned steps whose outcome may still come."""
_TRIAL_LENGTH = 2
_TRIAL_COST = 1.25
"""Most that a trial may take, in plain steps and without drafter passes, where there are requests to leave out."""
_OPTIMISM, _OPTIMISM_PLAIN = 1.0, 0.3
"""Standard deviations hoped for: what is little known is tried as long as it may well pay. In plain decoding, which
has trials of its own, less."""
_ROUNDS = 2
"""Times that lengths and the value of a token are fitted to each other; they go on from the last ones."""
_SETTLED = 0.02
_TRIM_FROM = 0.1
"""Where a rule ends drafts, only a last token each may not be worth its row: looked at from this share of a step on."""
_FIRST_STEPS = 24
"""Looked at one by one."""
_LOOK_S, _LOOK_SHARE, _RAREST = 2e-4, 0.01, 8
"""A look takes about 0.2 ms; it may take 1 % of the time; but not more than 8 steps are let pass."""


class AutoController:
    """Joint draft stop and verification trim with per-request lengths, and plain decoding where that is faster.

    Each step: what is a token worth in seconds (``lengths``), given learnt acceptance (``acceptance``) and measured
    cost (``curve``, ``draft_cost``); which proposer pays for which request (``drafter``); does it beat plain decoding
    (``guard``).
    """

    def __init__(
        self,
        limits: Limits,
        *,
        longest: int,
        costs: PassCosts | None = None,
        warm_start: Profile | None = None,
    ) -> None:
        """
        Args:
            limits: of the host.
            longest: longest draft.
            costs: passes measured at start-up; None = learnt from the first steps.
            warm_start: a saved profile.
        """
        costs = costs or PassCosts()
        self._limits = limits
        self._planner = ChainPlanner(limits)
        self._longest = min(longest, self._planner.longest)
        self._target = CostCurve(costs.target or saved_curve(warm_start))
        self._drafters = _drafters(limits, costs, warm_start)
        self._can_trim = limits.can_trim and limits.ragged and _dense(limits)
        self._runnable = np.isin(np.arange(self._longest + 1), limits.draft_lens)
        self._places = Places()
        self._guard = PlainGuard()
        self._host_s = 0.0
        self._value = 0.0
        self._pending: dict[int, Pending] = {}
        self._latest = Prediction(False, 0.0, 0.0)
        self._plain_s = 0.0
        self._agreement: Agreement | None = None
        # What look-ups have found changes with every token.
        self._lasting = all(isinstance(drafter, ModelDrafter) for drafter in self._drafters)
        self._unread: list[tuple[StepOutcome, Pending | None]] = []
        self._steps_read = 0
        self._every = 1

    def plan(self, view: StepView) -> SpecPlan:
        requests = len(view.ids)
        if not requests or not self._drafters:
            return plain_plan(view)
        agreed = self._agreement
        if agreed is None or agreed.steps <= 0 or agreed.ids != view.ids or agreed.prefill != view.prefill_tokens:
            agreed = self._agreement = self._negotiate(view)
        agreed.steps -= 1
        mode = self._guard.decide(agreed.hoped, requests / self._plain_s)
        if mode == "speculate" and agreed.drafts:
            plan = self._planner.plan(view, agreed.wish, agreed.stop)
            plan = plan if agreed.owner is None else replace(plan, proposer=agreed.owner)
            prediction = agreed.prediction
        elif mode == "probe_draft":
            plan = self._trial(view)
            prediction = Prediction(True, float(requests), self._plain_s)
        else:
            plan = plain_plan(view)
            prediction = Prediction(False, float(requests), self._plain_s)
        self._latest = prediction
        self._remember(view, prediction, mode, trims=mode == "speculate" and agreed.trims)
        return plan

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        # Asynchronous hosts plan the next step before they trim this one: only what was noted for it counts here.
        pending = self._pending.get(view.step)
        if pending is None or not pending.trims:
            return self._planner.trim(view, plan, drafts)
        lens = np.array(tuple(map(min, plan.depth, drafts.length)), dtype=np.int64)
        drafted = int(lens.sum())
        if not drafted:
            return self._planner.trim(view, plan, drafts)
        survival = self._survival(view, self._take_places(view), plan, drafts, lens)
        budget = drafted if plan.verify_nodes is None else plan.verify_nodes
        base_rows = float(len(view.ids) + view.prefill_tokens)
        depth = admit_by_survival(survival, lens, self._value, KNOTS, self._target.seconds, base_rows, budget)
        admitted = tuple(depth.tolist())
        return plan if admitted == plan.depth else plan.with_depth(admitted)

    def observe(self, outcome: StepOutcome) -> None:
        self._unread.append((outcome, self._pending.pop(outcome.plan_step, None)))
        failed = any(outcome.drafted) and not any(outcome.accepted)
        if failed or len(self._unread) >= self._every:
            self._read()
        if failed and self._agreement is not None:
            self._agreement.steps = 0  # what was agreed may rest on a drafter that is no longer of use

    def forget(self, ids: Sequence[str]) -> None:
        if ids:
            self._read()
            self._places.forget(ids)

    def estimates(self) -> Mapping[str, Any]:
        """What the latest plan rested on."""
        latest, agreed = self._latest, self._agreement
        return {
            "mode": self._guard.mode,
            "goodput": latest.emitted / latest.seconds if latest.seconds else 0.0,
            "predicted_emitted": latest.emitted,
            "predicted_step_s": latest.seconds,
            "plain_step_s": self._plain_s,
            "plain_correction": self._guard.plain.value,
            "speculation_correction": self._guard.speculation.value,
            "lambda": 1.0 / self._value if self._value else 0.0,
            "thresholds": list(agreed.stop.below) if agreed and agreed.stop else [],
            "total_thresholds": list(agreed.stop.total_below) if agreed and agreed.stop else [],
            "host_s": self._host_s,
            "target_curve": self._target.document(),
            "proposers": {
                traits.name: drafter.document()
                for traits, drafter in zip(self._limits.proposers, self._drafters, strict=True)
            },
        }

    # --- planning ---------------------------------------------------------------------------------------------

    def _take_places(self, view: StepView) -> Ints:
        places, new = self._places.get(view.ids)
        for drafter in self._drafters:
            drafter.grow(len(self._places))
            for index in new:
                expected = view.expected_acceptance[index] if view.expected_acceptance else None
                drafter.admit(int(places[index]), expected)
        return places

    def _caps(self, view: StepView) -> Ints:
        cap = np.minimum(np.array(view.room_depth, dtype=np.int64), self._longest)
        if any(wish is not None for wish in view.max_draft):
            cap = np.minimum(cap, [self._longest if wish is None else wish for wish in view.max_draft])
        return cap if self._limits.ragged else np.full(cap.size, cap.min())

    def _negotiate(self, view: StepView) -> Agreement:
        """Lengths and proposers for the next steps, at the value of a token that follows from them."""
        places, cap = self._take_places(view), self._caps(view)
        requests = cap.size
        base_rows = float(requests + view.prefill_tokens)
        self._plain_s = self._target.at(requests) + self._host_s
        self._value = self._value or self._plain_s / requests
        for _ in range(_ROUNDS):
            situation = self._situation(places, cap, base_rows)
            wish, owner = self._route(view, situation)
            seconds = wish.seconds + self._target.at(requests + wish.rows) + self._host_s
            hoped = (requests + wish.hoped) / seconds
            best = max(hoped, requests / self._plain_s)
            settled = abs(best * self._value - 1.0) < _SETTLED
            self._value = 1.0 / best
            if settled:
                break
        drafts = wish.hoped > 0.0
        depth, stop = self._open_ends(self._situation(places, cap, float(requests)), wish.depth, owner)
        row_s = (self._target.at(base_rows + 2 * requests) - self._target.at(base_rows + requests)) / requests
        worthwhile = stop is None or requests * row_s > _TRIM_FROM * self._plain_s
        self._every = self._cadence(seconds if drafts else self._plain_s)
        return Agreement(
            ids=view.ids,
            prefill=view.prefill_tokens,
            wish=depth.tolist(),
            owner=tuple(owner.tolist()) if owner.any() else None,
            stop=stop,
            hoped=hoped if drafts else 0.0,
            prediction=Prediction(drafts, requests + wish.expected, seconds),
            drafts=drafts,
            trims=self._can_trim and worthwhile,
            steps=self._every if self._lasting else 1,
        )

    def _cadence(self, step_s: float) -> int:
        """Steps between two looks at what has been learnt, so that looking takes a small share of the time."""
        if self._steps_read < _FIRST_STEPS:
            return 1
        return min(_RAREST, max(1, math.ceil(_LOOK_S / (_LOOK_SHARE * step_s))))

    def _situation(self, places: Ints, cap: Ints, base_rows: float) -> Situation:
        optimism = _OPTIMISM if self._guard.speculating else _OPTIMISM_PLAIN
        return Situation(places, cap, self._runnable, self._value, optimism, self._target, base_rows)

    def _route(self, view: StepView, situation: Situation) -> tuple[Wish, Ints]:
        """Every request goes to the proposer that gains most for it."""
        wishes = [drafter.wish(view, situation) for drafter in self._drafters]
        owner = np.zeros(situation.cap.size, np.int64)
        if len(wishes) == 1:
            return wishes[0], owner
        owner = np.argmax([wish.worth for wish in wishes], axis=0)
        whole = situation.cap
        depth = np.zeros_like(whole)
        hoped = expected = seconds = rows = 0.0
        for index, drafter in enumerate(self._drafters):
            # Once more for its own requests alone, which share the cost of its passes.
            own = drafter.wish(view, replace(situation, cap=np.where(owner == index, whole, 0)))
            depth = np.where(owner == index, own.depth, depth)
            hoped, expected = hoped + own.hoped, expected + own.expected
            seconds, rows = seconds + own.seconds, rows + own.rows
        return Wish(depth, np.zeros(whole.size), hoped, expected, seconds, rows), owner

    def _trial(self, view: StepView) -> SpecPlan:
        """Short drafts for as many requests as cost little, by the first proposer that has something to offer."""
        cap = self._caps(view)
        requests = cap.size
        depth, owner = np.zeros_like(cap), np.zeros_like(cap)
        extra = np.zeros(requests)
        for index, drafter in enumerate(self._drafters):
            offered = np.minimum(drafter.caps(view, cap), _TRIAL_LENGTH)
            chosen = (depth == 0) & (offered > 0)
            owner[chosen], depth[chosen] = index, offered[chosen]
            extra[chosen] = drafter.catching_up(view)[chosen]
        if self._limits.ragged:
            # Those that lag least, as many as fit into the allowance, but one at least.
            order = np.argsort(extra + (depth == 0) * self._plain_s * requests, kind="stable")
            rows = requests + np.cumsum(depth[order])
            cost = np.cumsum(extra[order]) + [self._target.at(float(r)) for r in rows]
            depth[order[1:][cost[1:] > _TRIAL_COST * self._plain_s]] = 0
        plan = self._planner.plan(view, depth.tolist())
        return replace(plan, proposer=tuple(owner.tolist())) if owner.any() else plan

    def _open_ends(self, situation: Situation, depth: Ints, owner: Ints) -> tuple[Ints, StopRule | None]:
        """Where a rule ends drafts by what they turn out to be, the length expected is no limit."""
        for index, drafter in enumerate(self._drafters):
            mine = (owner == index) & (depth > 0)
            if drafter.stops and mine.any():
                stop = drafter.rule(situation)
                return np.where(mine, np.minimum(situation.cap, _open_end(stop)), depth), stop
        return depth, None

    def _remember(self, view: StepView, prediction: Prediction, mode: Mode, *, trims: bool) -> None:
        match = tuple(None if column is None else tuple(n for n, _ in column) for column in view.offers)
        self._pending[view.step] = Pending(prediction, mode, trims, match)
        if len(self._pending) > _PENDING:
            del self._pending[next(iter(self._pending))]

    # --- after drafting ---------------------------------------------------------------------------------------

    def _survival(self, view: StepView, places: Ints, plan: SpecPlan, drafts: DraftView, lens: Ints) -> Floats:
        confidence = _flat(drafts.confidence, lens)
        if len(self._drafters) == 1:
            return self._drafters[0].survivals(view, places, np.arange(lens.size), lens, confidence)
        owner = np.array(plan.proposer, dtype=np.int64)
        slot_owner = np.repeat(owner, lens)
        survival = np.zeros(int(lens.sum()))
        for index, drafter in enumerate(self._drafters):
            mine, slots = np.flatnonzero(owner == index), slot_owner == index
            survival[slots] = drafter.survivals(view, places[mine], mine, lens[mine], confidence[slots])
        return survival

    # --- learning ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Learns from the steps observed since the last time."""
        for outcome, pending in self._unread:
            self._weigh(outcome, pending)
        self._target.settle()
        self._learn()
        for drafter in self._drafters:
            drafter.age(len(self._unread))
        self._steps_read += len(self._unread)
        self._unread.clear()

    def _weigh(self, outcome: StepOutcome, pending: Pending | None) -> None:
        """What a step cost, against what was expected of it."""
        work = outcome.work
        rows = work.verify_rows + work.prefill_rows
        if rows and outcome.verify_s > 0.0:
            self._target.observe(rows, outcome.verify_s)
        if work.rows_per_pass or outcome.draft_s > 0.0:
            used = {p for p, k in zip(outcome.proposer, outcome.requested, strict=True) if k > 0}
            if len(used) == 1:
                drafting = sum(drafted > 0 for drafted in outcome.drafted)
                self._drafters[used.pop()].spent(work, drafting, outcome.draft_s)
        if outcome.ids and not work.prefill_rows and outcome.step_s > 0.0:
            host = max(0.0, outcome.step_s - outcome.draft_s - outcome.verify_s)
            limit = 3.0 * self._host_s if self._host_s else host
            self._host_s = _HOST_FORGET * self._host_s + (1 - _HOST_FORGET) * min(host, limit) if limit else host
            if pending is not None:
                self._judge(pending, outcome)

    def _judge(self, pending: Pending, outcome: StepOutcome) -> None:
        """Holds a step of decoding alone against its prediction; a trial against plain decoding."""
        emitted, predicted = sum(outcome.emitted), pending.prediction
        if pending.mode == "probe_draft":
            self._guard.tried(emitted * predicted.seconds > outcome.step_s * predicted.emitted)
        else:
            self._guard.observe(predicted, emitted, outcome.step_s)

    def _learn(self) -> None:
        """Accepted tokens and first rejections, to the models of the proposers that they came from."""
        seen: list[list[tuple[int, int, float, float, int]]] = [[] for _ in self._drafters]
        for outcome, pending in self._unread:
            requests = zip(
                outcome.ids, outcome.proposer, outcome.drafted, outcome.accepted, outcome.ended, outcome.confidence,
                strict=True,
            )  # fmt: skip
            for index, (request, proposer, drafted, accepted, ended, confidence) in enumerate(requests):
                place = self._places.find(request) if drafted else None
                if place is None:
                    continue
                matches = pending.match[proposer] if pending is not None else None
                match = matches[index] if matches is not None and index < len(matches) else 1
                for position in range(accepted + (ended == "rejected")):
                    signal = confidence[position] if position < len(confidence) else 0.5
                    seen[proposer].append((position, place, float(position < accepted), signal, match))
        for drafter, slots in zip(self._drafters, seen, strict=True):
            if slots:
                columns = np.ascontiguousarray(np.array(slots).T)
                whole = columns.astype(np.int64)
                drafter.observe(whole[0], whole[1], columns[2], columns[3], whole[4])


def _drafters(limits: Limits, costs: PassCosts, profile: Profile | None) -> list[Drafter]:
    rates = profile.acceptance_rate_per_pos if profile is not None else ()
    # Lengths are rounded before drafting, not after: where few can run, or all must be alike, drafts cannot end early.
    can_stop = limits.can_stop and limits.ragged and _dense(limits)
    drafters: list[Drafter] = []
    for index, traits in enumerate(limits.proposers):
        if traits.passes_per_draft == "none":
            drafters.append(LookupDrafter(index, rates))
        else:
            start = costs.drafters[index] if index < len(costs.drafters) else ()
            drafters.append(ModelDrafter(traits, index, start, rates, can_stop))
    return drafters


def _dense(limits: Limits) -> bool:
    """Whether every draft length up to the longest can run."""
    return len(limits.draft_lens) == limits.draft_lens[-1] + 1


def _open_end(rule: StopRule | None) -> int:
    """Draft tokens after which the rule stops whatever happens."""
    if rule is None:
        return 0
    return next((done for done, below in enumerate(rule.below, 1) if below >= 1.0), len(rule.below) + 1)


def _flat(confidence: Sequence[Sequence[float]], lens: Ints) -> Floats:
    """The confidences [N] of all drafted tokens, one request after the other; 0.5 where a proposer gives none."""
    total = int(lens.sum())
    cut = [row[:length] for row, length in zip(confidence, lens.tolist(), strict=True)]
    if all(len(row) == length for row, length in zip(cut, lens.tolist(), strict=True)):
        return np.fromiter(chain.from_iterable(cut), np.float64, total)
    padded = ((*row, *(0.5,) * (length - len(row))) for row, length in zip(cut, lens.tolist(), strict=True))
    return np.fromiter(chain.from_iterable(padded), np.float64, total)
