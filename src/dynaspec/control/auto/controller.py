"""``auto``: how much to draft and to verify, per request and step, from measured cost and learnt acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from .curve import KNOTS, CostCurve
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
"""Times that lengths and the value of a token are fitted to each other in a step; they go on from the last step's."""


@dataclass(slots=True)
class _Pending:
    """A planned step, until its outcome comes."""

    prediction: Prediction
    mode: Mode
    match: tuple[tuple[int, ...] | None, ...]
    """For each proposer the match lengths [B] on offer."""


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
        seed: int = 0,
    ) -> None:
        """
        Args:
            limits: of the host.
            longest: longest draft.
            costs: passes measured at start-up; None = learnt from the first steps.
            warm_start: a saved profile.
            seed: for exploration at random, of which there is none so far.
        """
        costs = costs or PassCosts()
        self._limits = limits
        self._planner = ChainPlanner(limits)
        self._longest = min(longest, self._planner.longest)
        self._target = CostCurve(costs.target or _saved_curve(warm_start))
        self._drafters = _drafters(limits, costs, warm_start)
        self._can_trim = limits.can_trim and limits.ragged and _dense(limits)
        self._runnable = np.isin(np.arange(self._longest + 1), limits.draft_lens)
        self._places = Places()
        self._guard = PlainGuard()
        self._host_s = 0.0
        self._value = 0.0
        self._pending: dict[int, _Pending] = {}
        self._thresholds: tuple[float, ...] = ()
        self._latest = Prediction(False, 0.0, 0.0)
        self._plain_s = 0.0

    def plan(self, view: StepView) -> SpecPlan:
        requests = len(view.ids)
        if not requests or not self._drafters:
            return plain_plan(view)
        places = self._take_places(view)
        cap = self._caps(view)
        self._plain_s = self._target.at(requests) + self._host_s
        self._value = self._value or self._plain_s / requests
        wish, owner, hoped, prediction = self._negotiate(view, places, cap)
        mode = self._guard.decide(hoped, requests / self._plain_s)
        if mode == "probe_draft":
            wish, owner, prediction = self._trial(view, cap)
        if mode in ("plain", "probe_plain") or not wish.any():
            prediction = Prediction(False, float(requests), self._plain_s)
            plan = plain_plan(view)
        else:
            plan = self._speculate(view, places, cap, wish, owner, mode)
        self._latest = prediction
        self._remember(view, prediction, mode)
        return plan

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        if not self._can_trim or self._guard.mode == "probe_draft" or not any(drafts.length):
            return self._planner.trim(view, plan, drafts)
        lens = np.array(tuple(map(min, plan.depth, drafts.length)), dtype=np.int64)
        survival = self._survival(view, plan, drafts, lens)
        budget = int(lens.sum()) if plan.verify_nodes is None else plan.verify_nodes
        base_rows = float(len(view.ids) + view.prefill_tokens)
        depth = admit_by_survival(survival, lens, self._value, KNOTS, self._target.seconds, base_rows, budget)
        admitted = tuple(depth.tolist())
        return plan if admitted == plan.depth else plan.with_depth(admitted)

    def observe(self, outcome: StepOutcome) -> None:
        work, decoded = outcome.work, bool(outcome.ids)
        pending = self._pending.pop(outcome.plan_step, None)
        rows = work.verify_rows + work.prefill_rows
        if rows and outcome.verify_s > 0.0:
            self._target.observe(rows, outcome.verify_s)
        self._learn(outcome, pending)
        for drafter in self._drafters:
            drafter.age()
        used = {p for p, k in zip(outcome.proposer, outcome.requested, strict=True) if k > 0}
        if len(used) == 1:
            self._drafters[used.pop()].spent(work, outcome.draft_s)
        if decoded and not work.prefill_rows and outcome.step_s > 0.0:
            host = max(0.0, outcome.step_s - outcome.draft_s - outcome.verify_s)
            limit = 3.0 * self._host_s if self._host_s else host
            self._host_s = _HOST_FORGET * self._host_s + (1 - _HOST_FORGET) * min(host, limit) if limit else host
            if pending is not None:
                self._judge(pending, outcome)

    def forget(self, ids: Sequence[str]) -> None:
        self._places.forget(ids)

    def estimates(self) -> Mapping[str, Any]:
        """What the latest plan rested on."""
        latest, requests = self._latest, max(1.0, self._latest.emitted)
        return {
            "mode": self._guard.mode,
            "goodput": latest.emitted / latest.seconds if latest.seconds else 0.0,
            "predicted_emitted": latest.emitted,
            "predicted_step_s": latest.seconds,
            "plain_step_s": self._plain_s,
            "plain_correction": self._guard.plain.value,
            "speculation_correction": self._guard.speculation.value,
            "lambda": 1.0 / self._value if self._value else 0.0,
            "thresholds": list(self._thresholds),
            "host_s": self._host_s,
            "target_curve": self._target.document() if requests else [],
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

    def _negotiate(self, view: StepView, places: Ints, cap: Ints) -> tuple[Ints, Ints, float, Prediction]:
        """Lengths [B], proposers [B], hoped for tokens/s and prediction, at the value of a token that follows."""
        requests = cap.size
        base_rows = float(requests + view.prefill_tokens)
        for _ in range(_ROUNDS):
            situation = self._situation(places, cap, base_rows)
            wish, owner = self._route(view, situation)
            drafted = float(wish.rows)
            seconds = wish.seconds + self._target.at(requests + drafted) + self._host_s
            hoped = (requests + wish.hoped) / seconds
            best = max(hoped, requests / self._plain_s)
            settled = abs(best * self._value - 1.0) < 0.02
            self._value = 1.0 / best
            if settled:
                break
        prediction = Prediction(wish.hoped > 0.0, requests + wish.expected, seconds)
        return wish.depth, owner, hoped if prediction.drafts else 0.0, prediction

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

    def _trial(self, view: StepView, cap: Ints) -> tuple[Ints, Ints, Prediction]:
        """Short drafts for as many requests as cost little, by the first proposer that has something to offer.

        What is predicted for it is plain decoding, which it has to beat.
        """
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
        return depth, owner, Prediction(True, float(requests), self._plain_s)

    def _speculate(self, view: StepView, places: Ints, cap: Ints, wish: Ints, owner: Ints, mode: Mode) -> SpecPlan:
        stop: StopRule | None = None
        if mode == "speculate":
            for index, drafter in enumerate(self._drafters):
                mine = (owner == index) & (wish > 0)
                if drafter.stops and mine.any():
                    situation = self._situation(places, cap, float(cap.size))
                    stop = drafter.rule(situation)
                    # The rule ends drafts by what they turn out to be; the length expected is no limit then.
                    wish = np.where(mine, np.minimum(cap, _open_end(stop)), wish)
        self._thresholds = stop.below if stop is not None else ()
        plan = self._planner.plan(view, wish.tolist(), stop)
        return plan if not owner.any() else replace(plan, proposer=tuple(owner.tolist()))

    def _remember(self, view: StepView, prediction: Prediction, mode: Mode) -> None:
        match = tuple(None if column is None else tuple(n for n, _ in column) for column in view.offers)
        self._pending[view.step] = _Pending(prediction, mode, match)
        if len(self._pending) > _PENDING:
            del self._pending[next(iter(self._pending))]

    # --- after drafting ---------------------------------------------------------------------------------------

    def _survival(self, view: StepView, plan: SpecPlan, drafts: DraftView, lens: Ints) -> Floats:
        confidence = _flat(drafts.confidence, lens)
        places, _ = self._places.get(view.ids)
        if len(self._drafters) == 1:
            return self._drafters[0].survivals(view, places, np.arange(lens.size), lens, confidence)
        owner = np.array(plan.proposer, dtype=np.int64)
        slot_owner = np.repeat(owner, lens)
        survival = np.zeros(int(lens.sum()))
        for index, drafter in enumerate(self._drafters):
            mine, slots = np.flatnonzero(owner == index), slot_owner == index
            survival[slots] = drafter.survivals(view, places[mine], mine, lens[mine], confidence[slots])
        return survival

    def _judge(self, pending: _Pending, outcome: StepOutcome) -> None:
        """Holds a step of decoding alone against its prediction; a trial against plain decoding."""
        emitted, predicted = sum(outcome.emitted), pending.prediction
        if pending.mode == "probe_draft":
            self._guard.tried(emitted * predicted.seconds > outcome.step_s * predicted.emitted)
        else:
            self._guard.observe(predicted, emitted, outcome.step_s)

    def _learn(self, outcome: StepOutcome, pending: _Pending | None) -> None:
        """Accepted tokens and first rejections, to the models of the proposers that they came from."""
        seen: list[list[tuple[int, int, float, float, int]]] = [[] for _ in self._drafters]
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
    # Lengths are rounded before drafting, not after: where few can run, drafts cannot end early.
    can_stop = limits.can_stop and _dense(limits)
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


def _saved_curve(profile: Profile | None) -> tuple[tuple[int, float], ...]:
    """Plain decoding of a saved profile: a step of b requests has b rows."""
    if profile is None:
        return ()
    return tuple((batch, profile.itl_ms(batch, 0) / 1e3) for batch in sorted(profile.batch_stats))


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
