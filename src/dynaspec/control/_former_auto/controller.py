"""``auto``: how much to draft and to verify, per request and step, from measured cost and learnt acceptance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import DraftView, Limits, Needs, SpecPlan, StepOutcome, StepView

from ..plain import plain_plan
from ..planner import ChainPlanner
from ..profile import Profile
from .acceptance import Places
from .agreement import ALIKE_STEPS, Agreement, Pending
from .beside import Found, beside_models
from .costs import StepCosts
from .doubt import Doubt
from .drafter import GLIMPSE, HORIZON, ModelDrafter, Situation
from .guard import Mode, PlainGuard
from .learning import Learner
from .lengths import admit_by_survival
from .parts import row_s
from .prediction import Prediction
from .routing import open_ends, survival_of, trial_drafts, trial_s
from .start import dense, make_drafters, with_profile
from .worth import Scales

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PENDING = 16
"""Planned steps whose outcome may still come."""
_OPTIMISM = 0.6
"""Standard deviations hoped for: what is little known is tried as long as it may well pay."""
_FORESIGHT = 256.0
"""Steps over which reading all that a drafter lacks is paid off where drafting is to begin: it mostly lasts."""
_CHEAP_ROW = 0.35
"""Where a row costs a larger share of a token's worth, look-ups beside a model bring less than asking them takes."""
_TRIM_FROM = 0.6
"""Where a rule ends drafts, only a last token each may not be worth its row: looked at where all requests' rows take
this share of a step of plain decoding, as below that looking takes what it brings."""
_AMPLE = 1 << 20
"""Tokens left: more than enough for anything to be paid off."""
_FIRST_STEPS, _FIRST_EVERY = 24, 4
"""Looked at one by one as long as they draft, and now and then in plain decoding."""
_UNTRIED_DRAFTS, _UNTRIED_LENGTH = 4, 4
"""The very first are short, whatever the drafter says of them."""
_ASK_S = 2.5e-5
"""What asking for look-ups takes in a step, about, on a server's CPU."""
_LOOK_S, _LOOK_SHARE, _RAREST = 4.5e-4, 0.0025, 32
"""A look takes about 0.3 ms within a step; it may take 0.25 % of the time; but not more than 16 steps are let pass."""
_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Rows at which the target's costs are reported."""


class AutoController:
    """Joint draft stop and verification trim with per-request lengths, and plain decoding where that is faster.

    Each step: what is a token worth in seconds (``lengths``), given learnt acceptance (``acceptance``) and measured
    cost (``costs``); which proposer pays for which request (``drafter``); does it beat plain decoding (``guard``). That
    is settled for some steps at a time (``agreement``), and so are the books on what came of them (``learning``).
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
        self._limits = limits
        self._planner = ChainPlanner(limits)
        self._longest = min(longest, self._planner.longest)
        self._costs = StepCosts(
            with_profile(costs or PassCosts(), warm_start),
            [traits.passes_per_draft != "none" for traits in limits.proposers],
        )
        self._drafters = make_drafters(limits, self._costs, warm_start)
        self._any_length = limits.ragged and dense(limits)
        self._can_trim = limits.can_trim and self._any_length
        self._runnable = np.isin(np.arange(self._longest + 1), limits.draft_lens)
        self._places = Places()
        self._value = 0.0
        self._pending: dict[int, Pending] = {}
        self._latest = Prediction(False, 0.0, 0.0)
        self._agreement: Agreement | None = None
        models = [i for i, drafter in enumerate(self._drafters) if isinstance(drafter, ModelDrafter)]
        self._beside = beside_models(self._drafters, self._costs.target)
        self._asked = models if self._beside else range(len(self._drafters))
        # What look-ups have found changes with every token, and says beforehand what it may be worth.
        self._lasting = bool(models)
        known = warm_start is not None and bool(warm_start.acceptance_rate_per_pos)
        glimpses = any(limits.proposers[i].probe_context for i in models)
        self._guard = PlainGuard(only_by_trial=self._lasting, tries_first=glimpses and not known)
        self._quiet = 0
        """Coming steps of plain decoding that need no look."""
        self._every = 1
        self._doubt = Doubt(self._drafters)
        self._learner = Learner(limits.proposers, self._drafters, self._costs, self._guard, self._places)

    def plan(self, view: StepView) -> SpecPlan:
        guard, agreed = self._guard, self._agreement
        if self._quiet and agreed is not None and agreed.resembles(view):
            return self._go_on_plainly(view, agreed)
        self._quiet = 0
        calm = guard.calm > 0 and self._lasting
        if not self._drafters or not _room(view):
            return plain_plan(view)  # without a word about which mode pays
        # In calm plain decoding what was agreed holds however long ago that was.
        holds = agreed is not None and (agreed.steps > 0 or (calm and guard.mode == "plain"))
        if not holds or agreed is None or not (agreed.concerns(view) or self._extends(agreed, view)):
            if not view.lag:
                return plain_plan(view)  # nobody had foreseen that it would be needed
            agreed, calm = self._negotiate(view), False
            self._agreement = agreed
        agreed.steps -= 1
        if calm:
            mode = guard.hold()
        else:
            mode = guard.decide(
                agreed.hoped, agreed.expected, agreed.plain.goodput, len(view.ids), agreed.best, agreed.trial
            )
        alone = agreed.speculation if mode == "speculate" else agreed.plain
        asks = mode != "probe_draft" and agreed.looks_up and self._beside is not None and guard.affords_look_ups
        if asks and self._beside is not None and self._beside.asked(view):
            guard.looked_up(_ASK_S / alone.seconds)
        if asks and self._beside is not None and self._beside.offered(view):
            found = self._beside.find(view, self._situation(view), agreed, alone, guard.speculation.value)
            if found is not None:
                if alone.drafts:  # beside plain decoding, steps tell
                    guard.expects_of_look_ups(found.gain_s / alone.seconds)
                return self._look_up(view, agreed, mode, alone, found)
        self._note(view, agreed, mode, alone)
        if mode == "probe_draft":
            return self._trial(view, agreed.granted)
        next_needs: Needs = "all" if asks or not self._lasting or not guard.calm else "lag"
        if mode == "speculate":
            return agreed.again(view, next_needs, any_length=self._any_length) or self._draft(view, agreed, next_needs)
        self._quiet = self._quiet_steps(agreed)
        if self._quiet:
            self._every = self._cadence(agreed.plain.seconds)
        return plain_plan(view, next_needs="nothing" if self._quiet else next_needs)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        if not any(plan.depth):
            return plan
        # Asynchronous hosts plan the next step before they trim this one: only what was noted for it counts here.
        pending = self._pending.get(view.step)
        if pending is None or not pending.trims:
            return self._planner.trim(view, plan, drafts)
        lens = tuple(map(min, plan.depth, drafts.length))
        drafted = sum(lens)
        if not drafted:
            return self._planner.trim(view, plan, drafts)
        survival = survival_of(self._drafters, view, self._take_places(view), plan, drafts, lens)
        budget = drafted if plan.verify_nodes is None else plan.verify_nodes
        base_rows = float(len(view.ids) + view.prefill_tokens)
        columns = np.array((lens, view.context_len), dtype=np.int64)
        depth = admit_by_survival(survival, *columns, self._value, self._costs.target, base_rows, budget)
        admitted = tuple(depth.tolist())
        return plan if admitted == plan.depth else plan.with_depth(admitted)

    def observe(self, outcome: StepOutcome) -> None:
        pending = self._pending.pop(outcome.plan_step, None)
        if pending is None and self._guard.calm and self._guard.mode == "plain" and not any(outcome.drafted):
            self._learner.pass_over()
            return
        self._learner.add(outcome, pending)
        alarm = False
        if any(outcome.drafted):
            trial = pending is not None and pending.mode == "probe_draft"
            self._doubt.watch(outcome, trial=trial)
            paid_for = pending is not None and pending.by_look_ups_alone
            failed = not any(outcome.accepted) and (paid_for or self._doubt.failures > 1)
            alarm = trial or failed  # what was agreed may hold no longer
        if alarm or self._learner.unread >= self._every:
            self._learner.read()
        if alarm and self._agreement is not None:
            self._agreement.steps = self._guard.calm = self._quiet = 0

    def forget(self, ids: Sequence[str]) -> None:
        self._learner.forget(ids)

    def estimates(self) -> Mapping[str, Any]:
        """What the latest plan rested on."""
        latest, agreed = self._latest, self._agreement
        return {
            "mode": self._guard.mode,
            "goodput": latest.goodput,
            "predicted_emitted": latest.emitted,
            "predicted_step_s": latest.seconds,
            "plain_step_s": agreed.plain.seconds if agreed else 0.0,
            "plain_goodput": agreed.plain.goodput if agreed else 0.0,
            "speculation_goodput": agreed.speculation.goodput if agreed and agreed.speculation.drafts else 0.0,
            "plain_correction": self._guard.plain.value,
            "speculation_correction": self._guard.speculation.value,
            "lambda": 1.0 / self._value if self._value else 0.0,
            "thresholds": list(agreed.stop.below) if agreed and agreed.stop else [],
            "total_thresholds": list(agreed.stop.total_below) if agreed and agreed.stop else [],
            "host_s": self._learner.host_s(drafts=latest.drafts),
            "pace": self._costs.pace,
            "target_curve": [[rows, self._costs.pass_s(rows, 0.0, 0.0)] for rows in _KNOTS],
            "proposers": {
                traits.name: drafter.document()
                for traits, drafter in zip(self._limits.proposers, self._drafters, strict=True)
            },
        }

    # --- planning ---------------------------------------------------------------------------------------------

    def _take_places(self, view: StepView) -> Ints:
        self._learner.rename(view.ids)
        places, new = self._places.get(view.ids)
        if new:
            for drafter in self._drafters:
                drafter.grow(len(self._places))
                for index in new:
                    expected = view.expected_acceptance[index] if view.expected_acceptance else None
                    drafter.admit(int(places[index]), expected)
        return places

    def _caps(self, view: StepView, room: Ints) -> Ints:
        longest = min(self._longest, _UNTRIED_LENGTH if self._learner.drafts < _UNTRIED_DRAFTS else self._longest)
        cap = np.minimum(room, longest)
        if view.max_draft.count(None) < len(view.max_draft):
            cap = np.minimum(cap, [self._longest if wish is None else wish for wish in view.max_draft])
        return cap if self._limits.ragged else np.full(cap.size, cap.min())

    def _negotiate(self, view: StepView) -> Agreement:
        """Lengths and proposers for the next steps, at the value of a token that follows from them."""
        situation = self._situation(view)
        requests, context, guard = len(view.ids), float(sum(view.context_len)), self._guard
        plain = self._predict_plain(view)
        plain_s = plain.seconds
        host_s = self._learner.host_s(drafts=True)
        scales = Scales(self._drafters, self._asked, view, situation, self._costs, host_s)
        best, self._value = scales.settle(self._value or plain_s / requests, guard.speculation.value, plain.goodput)
        if not best.wish.rows:
            # What would nearly pay is for the guard to judge, who knows how steps have held what was predicted.
            best = scales.nearly(self._value, drafting=guard.speculating)
        wish, owner, drafts = best.wish, best.owner, best.wish.rows > 0.0
        at_best, trial = math.inf, 0.0
        situation.value = self._value
        if not guard.speculating:
            at_best = scales.best_goodput(self._value)
            # What a step with prefill takes is not compared with plain decoding.
            alone = not view.prefill_tokens
            trial = trial_s(self._drafters, view, situation, self._costs) / plain_s if alone else math.inf
        depth, stop = open_ends(self._drafters, situation, wish.depth, owner) if drafts else (wish.depth, None)
        row = float(row_s(self._costs.target, situation.base_rows + requests))
        usual = int(wish.depth.argmax())
        self._every = self._cadence(best.seconds if drafts else plain_s)
        return Agreement(
            ids=view.ids,
            prefill=view.prefill_tokens,
            lengths=wish,
            granted=depth,
            owner=None if owner is None else tuple(owner.tolist()),
            stop=stop,
            hoped=best.hoped if drafts else 0.0,
            expected=(requests + wish.expected) / best.seconds if drafts else 0.0,
            best=at_best,
            trial=trial,
            speculation=Prediction(drafts, requests + wish.expected, best.seconds),
            plain=plain,
            trims=self._can_trim and drafts and (stop is None or requests * row > _TRIM_FROM * plain_s),
            looks_up=row + float(self._costs.target[-1]) * context / requests < _CHEAP_ROW * self._value,
            steps=self._every if self._lasting else 1,
            learnt=self._learner.steps,
            settled_for=requests,
            usual=(int(wish.depth[usual]), float(wish.worth[usual]), int(depth[usual])),
            gain=scales.gain_s(wish),
        )

    def _extends(self, agreed: Agreement, view: StepView) -> bool:
        """Whether those who take others' places in drafting have joined what was agreed."""
        if not self._guard.speculating or not view.lag:
            return False
        if not agreed.extend(view, partial(self._drafters[self._asked[0]].reading_s, view), self._costs.pass_s):
            return False
        self._take_places(view)
        return True

    def _predict_plain(self, view: StepView) -> Prediction:
        requests, context = len(view.ids), float(sum(view.context_len))
        pass_s = self._costs.pass_s(requests, context, context)
        return Prediction(False, float(requests), pass_s + self._learner.host_s(drafts=False))

    def _cadence(self, step_s: float) -> int:
        """Steps between two looks at what has been learnt, so that looking takes a small share of the time."""
        if self._learner.steps < _FIRST_STEPS:
            return 1 if self._guard.speculating else _FIRST_EVERY
        return min(_RAREST, max(1, math.ceil(_LOOK_S / (_LOOK_SHARE * step_s))))

    def _situation(self, view: StepView) -> Situation:
        room = np.array(view.room_depth)
        # While decoding plainly a drafter lacks all of each request. Those here would be read in once; whether that
        # pays says nothing of those to come, whom it reads from the start.
        drafting = self._guard.speculating
        left = room if drafting else np.full_like(room, _AMPLE)
        return Situation(
            places=self._take_places(view),
            cap=self._caps(view, room),
            room=left,
            context=np.array(view.context_len),
            runnable=self._runnable,
            value=self._value,
            optimism=_OPTIMISM,
            base_rows=float(len(view.ids) + view.prefill_tokens),
            horizon=HORIZON if drafting else _FORESIGHT,
        )

    def _go_on_plainly(self, view: StepView, agreed: Agreement) -> SpecPlan:
        """A step of plain decoding like the last one, without another look."""
        self._guard.hold()
        self._quiet -= 1
        agreed.steps -= 1
        # The others tell the same; but those in which a request begins do not, and have to be among these.
        if view.step % ALIKE_STEPS["plain"] == 0 and len(view.ids) == len(agreed.ids):
            if self._learner.steps != agreed.learnt:
                agreed.renew(self._predict_plain(view), self._learner.steps)
            self._note(view, agreed, "plain", agreed.plain)
        return plain_plan(view, next_needs="nothing" if self._quiet else "all")

    def _quiet_steps(self, agreed: Agreement) -> int:
        """Coming steps of plain decoding in which nobody is asked for anything."""
        if not self._lasting or self._guard.mode != "plain":
            return 0
        looks_up = self._beside is not None and agreed.looks_up
        return min(self._guard.calm, self._guard.until_look_ups) if looks_up else self._guard.calm

    def _draft(self, view: StepView, agreed: Agreement, next_needs: Needs) -> SpecPlan:
        """A step as agreed."""
        granted = agreed.granted.tolist()
        plan = self._planner.plan(view, granted, agreed.stop, agreed.owner)
        if next_needs != plan.next_needs:
            plan = replace(plan, next_needs=next_needs)
        if plan.depth == tuple(granted):
            agreed.drafts = plan
        elif self._can_trim and plan.stop is not None:  # budgets cut drafts later: rooms and wishes alone did
            most = [self._longest if wish is None else wish for wish in view.max_draft]
            agreed.drafts = plan.with_depth(tuple(map(min, granted, most)))
        return plan

    def _look_up(self, view: StepView, agreed: Agreement, mode: Mode, alone: Prediction, found: Found) -> SpecPlan:
        """A step in which look-ups draft too."""
        rows, context = len(view.ids) + found.rows, float(sum(view.context_len))
        seconds = self._costs.pass_s(rows, context + found.context, context) + found.drafting_s
        seconds += self._learner.host_s(drafts=alone.drafts)
        self._latest = Prediction(alone.drafts, found.emitted, seconds)
        trims = mode == "speculate" and agreed.trims
        self._await(view, Pending(self._latest, mode, agreed.plain, found.share, trims, view.offers))
        return self._planner.plan(view, found.depth, found.stop, found.owner)

    def _note(self, view: StepView, agreed: Agreement, mode: Mode, alone: Prediction) -> None:
        """Remembers a step as agreed until its outcome comes."""
        pending, tries = agreed.pending.get(mode), mode == "probe_draft"
        if pending is None or tries or not self._lasting:
            offers = () if self._lasting else view.offers
            trims = mode == "speculate" and agreed.trims
            lag = view.lag if tries else ()
            pending = agreed.pending[mode] = Pending(alone, mode, agreed.plain, 0.0, trims, offers, lag)
        self._latest = alone
        self._await(view, pending)

    def _await(self, view: StepView, pending: Pending) -> None:
        self._pending[view.step] = pending
        if len(self._pending) > _PENDING:
            del self._pending[next(iter(self._pending))]

    def _trial(self, view: StepView, wish: Ints) -> SpecPlan:
        situation = self._situation(view)
        depth, owner = trial_drafts(self._drafters, view, situation, wish, self._costs, self._limits.ragged)
        _, stop = open_ends(self._drafters, situation, depth, owner)
        # It never stops, but whoever evaluates it tells the evidence.
        stop = None if stop is None else replace(stop, below=(0.0,), total_below=())
        return replace(self._planner.plan(view, depth.tolist(), stop, tuple(owner.tolist())), probe_context=GLIMPSE)


def _room(view: StepView) -> bool:
    """Whether any request can use a draft: all that near their end at once say nothing of those to come."""
    if 0 not in view.max_draft:
        return any(view.room_depth)
    return any(room and wish != 0 for room, wish in zip(view.room_depth, view.max_draft, strict=True))
