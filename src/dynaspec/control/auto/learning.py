"""What steps teach ``auto``: what is accepted, what they cost, and whether that was as predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from dynaspec.contract.costs import drafting_before, drafting_in, drafting_of, runs_model
from dynaspec.contract.signals import signal_of
from dynaspec.contract.step import ProposerTraits, SpecPlan, StepOutcome
from dynaspec.control.estimate.costs import MeasuredStep, StepCosts

from ..estimate.acceptance import AcceptanceModel, LaterChoices, LookupModel, RequestSlots
from .explore import PLAIN, Choice, Explorer, Prediction

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
class _Runs:
    """Verdicts on tokens of one proposer, in runs: each token is right, or not, where all before it in the run are."""

    verdicts: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """Of a model: slot, tokens, how many of them have a verdict, how many are right, position of the first."""
    signal: list[float] = field(default_factory=list)
    """… of all tokens, one run after the other."""
    matches: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Of a lookup: slot, length of the match, how many tokens have a verdict, how many are right."""


@dataclass(slots=True)
class Learner:
    """Teaches the estimators, several steps at a time."""

    proposers: Sequence[ProposerTraits]
    models: Mapping[int, AcceptanceModel]
    lookups: Mapping[int, LookupModel]
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
        self._learn_acceptance()
        told = [self._told(outcome, planned) for outcome, planned in self._unread]
        self.costs.observe(*(step for step in told if step is not None))
        if self._unread:
            latest, _ = self._unread[-1]
            self.explorer.watched = {1 + p for p, column in enumerate(latest.came_true) if column is not None}
        for estimator in chain[AcceptanceModel | LookupModel](self.models.values(), self.lookups.values()):
            estimator.pass_steps(len(self._unread))
        self.slots.release(self._ended)
        self._unread.clear()
        self._ended.clear()

    def _learn_acceptance(self) -> None:
        """From what was verified, and from what lookups offered where the text has come to it."""
        runs = [_Runs() for _ in self.proposers]
        for outcome, planned in self._unread:
            drafted = any(outcome.drafted)
            compared = [index for index, column in enumerate(outcome.came_true) if any(n for _, n, _ in column or ())]
            if not drafted and not compared:
                continue
            slots = self.slots.of(outcome.ids).tolist()
            if drafted:
                self._add_drafts(runs, outcome, planned, slots)
            for index in compared:
                self._add_offers(runs[index], index, outcome, slots)
        for index, found in enumerate(runs):
            if found.verdicts:
                slots, lengths, tested, accepted, starts = np.array(found.verdicts, dtype=np.int64).T.copy()
                signal = np.array(found.signal, dtype=np.float64)
                self.models[index].observe(slots, lengths, tested, accepted, signal, starts)
            if found.matches:
                self.lookups[index].observe(*np.array(found.matches, dtype=np.int64).T.copy())

    def _add_drafts(
        self, runs: Sequence[_Runs], outcome: StepOutcome, planned: Planned | None, slots: Sequence[int]
    ) -> None:
        """What was verified. A chain is one run. On a walk through a tree a new one begins where another than the first
        choice was accepted."""
        signal: Sequence[float] = ()
        if any(n and index in self.models for index, n in zip(outcome.proposer, outcome.drafted, strict=True)):
            signal = signal_of(outcome.signal, outcome.confidence, outcome.drafted).tolist()
        first = 0
        for i, (slot, index, drafted) in enumerate(zip(slots, outcome.proposer, outcome.drafted, strict=True)):
            own, found, accepted = signal[first : first + drafted], runs[index], outcome.accepted[i]
            first += drafted
            if not drafted:
                continue
            tested = accepted + (outcome.ended[i] in _REFUSED)
            if index in self.lookups:  # its drafts are chains, beside trees too
                offers = planned.offers[index] if planned and planned.ids == outcome.ids else None
                found.matches.append((slot, offers[i][0] if offers else 1, tested, accepted))
            elif outcome.tested is not None:
                self._add_walk(found, index, slot, outcome.tested[i], own, outcome.confidence[i])
            else:
                found.verdicts.append((slot, drafted, tested, accepted, 0))
                found.signal.extend(own)

    def _add_walk(
        self,
        runs: _Runs,
        index: int,
        slot: int,
        walk: Sequence[Sequence[int]],
        signal: Sequence[float],
        confidence: Sequence[float],
    ) -> None:
        start = 0
        for position, (first, *others) in enumerate(walk):
            runs.signal.append(signal[_node(first)])
            self.later[index].observe([confidence[_node(node)] for node in others], others)
            if first < 0 or position == len(walk) - 1:
                length = position + 1 - start
                runs.verdicts.append((slot, length, length, length - (first < 0), start))
                start = position + 1

    def _add_offers(self, runs: _Runs, index: int, outcome: StepOutcome, slots: Sequence[int]) -> None:
        """What a lookup offered to requests for which another drafted, or nobody."""
        columns = zip(slots, outcome.proposer, outcome.drafted, outcome.came_true[index] or (), strict=True)
        for slot, proposer, drafted, (match, compared, right) in columns:
            if compared and not (drafted and proposer == index):
                runs.matches.append((slot, match, min(compared, right + 1), right))

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
