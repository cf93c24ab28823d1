"""What steps teach ``auto``: what is accepted, what they cost, and whether that was as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynaspec.contract.signals import match_signals, signal_of
from dynaspec.contract.step import ProposerTraits, SpecPlan, StepOutcome
from dynaspec.contract.work import drafting_before, drafting_in, drafting_of, runs_model

from ..estimate.acceptance import AcceptanceModel, RequestSlots
from ..estimate.costs import StepCosts
from .explore import PLAIN, Choice, Explorer, Prediction

Floats = npt.NDArray[np.float64]

_PROMPT = 64
"""Prefilled rows that leave nothing else in the caches: the step after them tells nothing of what others cost."""
_COLD, _ALL, _EVERY = 10, 200, 4
"""First steps of a host, that run code that has hardly run before and tell nothing of what later ones take; steps of
which all teach costs; of later ones one in so many, as neighbours tell the same."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned step, until its outcome comes."""

    plan: SpecPlan
    ids: tuple[str, ...]
    choice: Choice
    expected: Prediction
    price: float
    """Seconds that a token is worth."""
    plain_s: float
    """Seconds of plain decoding."""
    offers: tuple[tuple[tuple[int, int], ...] | None, ...]
    """As in the view."""


class Learner:
    """Teaches the estimators, several steps at a time."""

    def __init__(
        self,
        proposers: Sequence[ProposerTraits],
        models: Sequence[AcceptanceModel],
        costs: StepCosts,
        explorer: Explorer,
        slots: RequestSlots,
    ) -> None:
        self._proposers, self._models, self._costs = proposers, models, costs
        self._explorer, self._slots = explorer, slots
        self._unread: list[tuple[StepOutcome, Planned | None]] = []
        self._ended: list[str] = []
        self._after_prompt = False
        self._cold = _COLD

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
            self._learn_acceptance(drafted)
        for outcome, planned in self._unread:
            self._learn_costs(outcome, planned)
        for model in self._models:
            model.pass_steps(len(self._unread))
        self._slots.release(self._ended)
        self._unread.clear()
        self._ended.clear()

    def _learn_acceptance(self, steps: Sequence[tuple[StepOutcome, Planned | None]]) -> None:
        outcomes = [outcome for outcome, _ in steps]
        slots = self._slots.find([request for outcome in outcomes for request in outcome.ids])
        drafted = np.array([n for outcome in outcomes for n in outcome.drafted], dtype=np.int64)
        accepted = np.array([n for outcome in outcomes for n in outcome.accepted], dtype=np.int64)
        refused = [end in ("rejected", "invalid") for outcome in outcomes for end in outcome.ended]
        proposer = np.array([p for outcome in outcomes for p in outcome.proposer], dtype=np.int64)
        signal = np.concatenate([signal_of(one.signal, one.confidence, one.drafted) for one in outcomes])
        for index, model in enumerate(self._models):
            mine, own = (proposer == index) & (drafted > 0), signal
            if not mine.any():
                continue
            if not runs_model(self._proposers[index]):
                own = np.concatenate(
                    [offered(planned.offers[index] if planned else None, one.drafted) for one, planned in steps]
                )
            model.observe(np.where(mine, slots, -1), drafted, accepted + np.array(refused), accepted, own)

    def _learn_costs(self, outcome: StepOutcome, planned: Planned | None) -> None:
        work, proposers, costs = outcome.work, self._proposers, self._costs
        after_prompt, self._after_prompt = self._after_prompt, work.prefill_rows > _PROMPT
        self._cold -= 1
        if outcome.step_s <= 0.0 or not outcome.ids or self._cold >= 0:
            return
        # A first pass that runs in any case belongs to the target's: then, too, only whole steps can be told apart.
        whole = outcome.verify_s == 0.0 or any(traits.idle_pass for traits in proposers)
        drafting = drafting_in(work, proposers) if whole else drafting_of(outcome, proposers)
        drafted = next((p for p, n in zip(outcome.proposer, outcome.drafted, strict=True) if n), -1)
        arm = 1 + (drafted if drafting is None else drafting.proposer)
        if outcome.verify_s == 0.0 and drafting is None and drafted >= 0 and runs_model(proposers[drafted]):
            arm = PLAIN  # what it verified was drafted the step before
        seconds = outcome.step_s
        if outcome.verify_s == 0.0:  # it has drafted for another plan than the one that it verified
            before = drafting_before(outcome, proposers)
            seconds += (costs.draft_s(before) if before else 0.0) - (costs.draft_s(drafting) if drafting else 0.0)
        settled, probe = self._explorer.ran(arm), planned is not None and planned.choice.probe
        if planned is not None and not work.prefill_rows and not after_prompt:
            self._explorer.observe(
                planned.choice, arm, len(outcome.ids), planned.expected, sum(outcome.emitted), seconds
            )
        if settled and not after_prompt and (probe or self._cold > -_ALL or outcome.plan_step % _EVERY == 0):
            usual = not probe or arm == PLAIN
            rows, draft_s = work.verify_rows + work.prefill_rows, None if whole else outcome.draft_s
            read = work.kv_tokens * len(outcome.ids) / max(1, work.verify_rows)
            rest_s = outcome.step_s - (draft_s or 0.0)
            costs.observe(rows, read, work.kv_tokens, rest_s, drafting, draft_s, usual=usual)


def offered(offers: tuple[tuple[int, int], ...] | None, lens: Sequence[int]) -> Floats:
    """[Σ lens] Signals of drafts that a lookup had offered; of the shortest match where that is not known."""
    match = [max(1, m) for m, _ in offers] if offers and len(offers) == len(lens) else [1] * len(lens)
    signals, lengths = match_signals(np.array(match), max(lens, default=0)), np.array(lens, dtype=np.int64)
    return signals[np.arange(signals.shape[1]) < lengths[:, None]]
