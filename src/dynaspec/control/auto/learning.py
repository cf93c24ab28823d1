"""What steps teach ``auto``: what is accepted, what they cost, and whether that was as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from dynaspec.contract.signals import match_signals, signal_of
from dynaspec.contract.step import ProposerTraits, SpecPlan, StepOutcome
from dynaspec.contract.work import drafting_before, drafting_in, drafting_of, runs_model
from dynaspec.control.estimate.costs import MeasuredStep, StepCosts

from ..estimate.acceptance import AcceptanceModel, LaterChoices, RequestSlots
from .explore import PLAIN, Choice, Explorer, Prediction

Floats = npt.NDArray[np.float64]
_REFUSED = frozenset(("rejected", "invalid"))
Offers = tuple[tuple[tuple[int, int], ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned step, until its outcome comes."""

    plan: SpecPlan
    ids: tuple[str, ...]
    prefill_tokens: int
    choice: Choice
    expected: Prediction
    price: float
    """Seconds that a token is worth."""
    trims: bool
    """Drafts are looked at before they are verified."""
    offers: Offers
    """As in the view."""


@dataclass(slots=True)
class Learner:
    """Teaches the estimators, several steps at a time."""

    proposers: Sequence[ProposerTraits]
    models: Sequence[AcceptanceModel]
    costs: StepCosts
    explorer: Explorer
    slots: RequestSlots
    later: Sequence[LaterChoices]
    """Of each proposer."""
    _unread: list[tuple[StepOutcome, Planned | None]] = field(default_factory=list)
    _ended: list[str] = field(default_factory=list)
    _after_prompt: bool = False

    def add(self, outcome: StepOutcome, planned: Planned | None) -> None:
        """A step to be learnt from; None: how it was planned is not known any more."""
        self._unread.append((outcome, planned))

    def end(self, ids: Sequence[str]) -> None:
        """These requests have ended; what they have taught is learnt first."""
        self._ended.extend(ids)

    def learn(self) -> None:
        """From the steps that have come since the last time."""
        drafted = [one for one in self._unread if any(one[0].drafted)]
        if drafted:
            self._learn_acceptance([one for one in drafted if one[0].tested is None])
            self._learn_walks([one for one in drafted if one[0].tested is not None])
        told = [self._told(outcome, planned) for outcome, planned in self._unread]
        self.costs.observe(*(step for step in told if step is not None))
        for model in self.models:
            model.pass_steps(len(self._unread))
        self.slots.release(self._ended)
        self._unread.clear()
        self._ended.clear()

    def _learn_walks(self, steps: Sequence[tuple[StepOutcome, Planned | None]]) -> None:
        """From trees. Where another than the first choice was accepted, the walk goes on: then a new run begins."""
        runs: dict[int, list[tuple[int, int, int, int]]] = {}
        signals: dict[int, list[float]] = {}
        for outcome, planned in steps:
            columns = zip(self.slots.of(outcome.ids).tolist(), outcome.proposer, outcome.tested or (), strict=True)
            for i, (slot, index, walk) in enumerate(columns):
                told, start = signals.setdefault(index, []), 0
                strength, confidence = self._strength(outcome, planned, i), outcome.confidence[i]
                for position, (first, *others) in enumerate(walk):
                    told.append(strength[_node(first)])
                    self.later[index].observe([confidence[_node(node)] for node in others], others)
                    if first < 0 or position == len(walk) - 1:
                        length = position + 1 - start
                        runs.setdefault(index, []).append((slot, length, length - (first < 0), start))
                        start = position + 1
        for index, found in runs.items():
            slots, tested, accepted, starts = (np.array(column, dtype=np.int64) for column in zip(*found, strict=True))
            self.models[index].observe(slots, tested, tested, accepted, np.array(signals[index]), starts)

    def _strength(self, outcome: StepOutcome, planned: Planned | None, i: int) -> Floats:
        """[drafted] What speaks for the tokens of request i."""
        lens = outcome.drafted[i : i + 1]
        if runs_model(self.proposers[outcome.proposer[i]]):
            return signal_of(outcome.signal[i : i + 1], outcome.confidence[i : i + 1], lens)
        offers = planned.offers[outcome.proposer[i]] if planned else None
        return matches(None if offers is None else offers[i : i + 1], lens)

    def _learn_acceptance(self, steps: Sequence[tuple[StepOutcome, Planned | None]]) -> None:
        if not steps:
            return
        outcomes = [outcome for outcome, _ in steps]
        slots = self.slots.of([request for outcome in outcomes for request in outcome.ids])
        drafted, accepted, proposer = (
            np.array(list(chain.from_iterable(columns)), dtype=np.int64)
            for columns in zip(*((one.drafted, one.accepted, one.proposer) for one in outcomes), strict=True)
        )
        refused = np.array([end in _REFUSED for outcome in outcomes for end in outcome.ended])
        signal = np.concatenate([signal_of(one.signal, one.confidence, one.drafted) for one in outcomes])
        for index, model in enumerate(self.models):
            mine, own = (proposer == index) & (drafted > 0), signal
            if not mine.any():
                continue
            if not runs_model(self.proposers[index]):
                told = ((one.drafted, planned.offers[index] if planned else None) for one, planned in steps)
                own = np.concatenate([matches(offers, lens) for lens, offers in told])
            model.observe(np.where(mine, slots, -1), drafted, accepted + refused, accepted, own)

    def _told(self, outcome: StepOutcome, planned: Planned | None) -> MeasuredStep | None:
        """What a step tells of costs, if anything, after the explorer has been told."""
        work, proposers, costs, drafting, arm = outcome.work, self.proposers, self.costs, None, PLAIN
        idle = any(traits.idle_pass for traits in proposers)
        # A longer prompt leaves nothing else in the caches: the step after it tells nothing of what others cost.
        after_prompt, self._after_prompt = self._after_prompt, work.prefill_rows > work.verify_rows
        if outcome.step_s <= 0.0 or not outcome.ids:
            return None
        seconds, ahead = outcome.step_s, outcome.verify_s == 0.0
        if work.rows_per_pass or any(outcome.drafted):
            drafting = drafting_of(outcome, proposers)
            if ahead or idle:
                drafting = drafting_in(work, proposers, len(outcome.ids))
            drafted = next((p for p, n in zip(outcome.proposer, outcome.drafted, strict=True) if n), -1)
            arm = 1 + (drafted if drafting is None else drafting.proposer)
            if ahead and drafting is None and drafted >= 0 and runs_model(proposers[drafted]):
                arm = PLAIN  # what it verified was drafted the step before
            if ahead:  # it has drafted for another plan than the one that it verified
                before, now = drafting_before(outcome, proposers), drafting and replace(drafting, read_in=0)
                seconds += (costs.draft_s(before) if before else 0.0) - (costs.draft_s(now) if now else 0.0)
        settled, probe = self.explorer.ran(arm), planned is not None and planned.choice.probe
        if planned is not None:
            expected, emitted = planned.expected, sum(outcome.emitted)
            prompt_s = costs.prompt_s(len(planned.ids), planned.prefill_tokens)
            # Its share says more than the difference, where prompts take most of a step.
            seconds *= expected.seconds / (expected.seconds + prompt_s)
            self.explorer.observe(planned.choice, arm, len(outcome.ids), expected, emitted, seconds)
        if not settled or after_prompt or work.prefill_rows:  # taking a request in takes more than its rows
            return None
        rows, read = work.verify_rows + work.prefill_rows, work.kv_tokens * len(outcome.ids) / max(1, work.verify_rows)
        # A first pass that runs in any case belongs to the target's: then, too, only whole steps can be told apart.
        rest_s, draft_s = outcome.step_s - outcome.plan_s, -1.0
        if not ahead and not idle:
            rest_s, draft_s = rest_s - outcome.draft_s, outcome.draft_s
        told = MeasuredStep(rows, read, work.kv_tokens, rest_s, draft_s, usual=not probe or arm == PLAIN)
        return told if drafting is None else told.with_drafting(drafting)


def _node(told: int) -> int:
    """The node of an entry of ``StepOutcome.tested``."""
    return told if told >= 0 else ~told


def matches(offers: tuple[tuple[int, int], ...] | None, lens: Sequence[int]) -> Floats:
    """[Σ lens] Signals of drafts that a lookup had offered; of the shortest match where that is not known."""
    known = offers if offers is not None and len(offers) == len(lens) else ((1, 1),) * len(lens)
    return match_signals([match for match, _ in known], lens)
