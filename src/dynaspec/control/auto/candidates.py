"""What each proposer would draft in a step, for which request, and what that is expected to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynaspec.contract.signals import match_signals
from dynaspec.contract.step import Limits, StepView
from dynaspec.contract.work import runs_model

from ..estimate.acceptance import AcceptanceModel
from ..estimate.costs import StepCosts, row_price_s
from .explore import Prediction
from .lengths import Slots, Target, fill, reading, weigh
from .settings import AutoSettings

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MATCHES, _NEVER = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32]), 1 << 30
"""Lengths of matches by which it is told from which on a lookup pays."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Drafts of a step. B requests."""

    depth: Ints
    """[B] lengths that pay."""
    owner: Ints
    """[B] proposers."""
    long_run: Prediction
    """Of such steps; what the drafter has to read of a request is spread over those that it has left."""
    settled: Prediction
    """Of such steps, once that has been read."""
    reading_s: float
    """Seconds to read it, all in this step."""
    priced: Prediction
    """What a token's price follows from: such steps without lookups. Stretches that repeat the text come and go, and a
    price that was right in one is wrong behind it."""
    probe_context: int = 0
    """See ``SpecPlan``."""

    @property
    def step(self) -> Prediction:
        """Of this step."""
        return Prediction(self.settled.tokens, self.settled.seconds + self.reading_s)


@dataclass(frozen=True, slots=True)
class Situation:
    """A step to plan, in columns of B requests."""

    view: StepView
    slots: Ints
    """Rows in the acceptance models."""
    cap: Ints
    """Longest draft possible."""
    context: Floats
    """KV entries of each request."""
    target: Target
    plain: Prediction
    """Of plain decoding."""


class Candidates:
    """Weighs what drafts bring against what they take.

    Args:
        models: of acceptance, one for each proposer.
        levels: draft lengths that can run, above 0.
    """

    def __init__(
        self, limits: Limits, models: Sequence[AcceptanceModel], costs: StepCosts, levels: Ints, settings: AutoSettings
    ) -> None:
        self._traits, self._models, self._costs = limits.proposers, models, costs
        self._levels, self._uniform, self._settings = levels, not limits.ragged, settings

    def of(self, price: float, at: Situation, *, probe: bool = False) -> dict[int, Candidate]:
        """By proposer, the drafts that bring most at a token price; at least one token, even if it does not pay.

        Args:
            probe: what may well pay, which tells more than what loses least, with as little to read as can be.
        """
        found: dict[int, Candidate] = {}
        looked_up = None if probe else self._look_up(price, at)
        if looked_up is not None:
            slots, depth, owner = looked_up
            tokens, seconds, _ = weigh(price, slots, depth, depth < 0, at.target)
            step = Prediction(at.plain.tokens + tokens, at.plain.seconds + seconds)
            found[int(owner[depth.argmax()])] = Candidate(
                depth, owner, step, step, 0.0, step if len(self._traits) == 1 else at.plain
            )
        for index, traits in enumerate(self._traits):
            candidate = self._draft(index, price, at, looked_up, probe) if runs_model(traits) else None
            if candidate is not None:
                found[index] = candidate
        return found

    def _draft(
        self, index: int, price: float, at: Situation, looked_up: tuple[Slots, Ints, Ints] | None, probe: bool
    ) -> Candidate | None:
        """What a model drafts; lookups draft for the requests to which they bring more, if that pays on the whole."""
        context, pay_off = 0, self._settings.pay_off
        if probe:
            context, pay_off = self._settings.probe_context * self._traits[index].probe_context, 1.0
        lag, room = np.array(at.view.lag[index], dtype=np.int64), np.array(at.view.room_depth, dtype=np.int64)
        read_in_s = self._costs.draft_terms(index)[3]
        cap, reads_s, read_s = reading(lag, room, at.cap, read_in_s, pay_off, context)
        slots = self._slots(index, at, cap, read_s)
        hoped = self._slots(index, at, cap, read_s, self._settings.hope) if probe else slots
        depth, owner = fill(price, hoped, self._levels, self._uniform, at.target), np.full(cap.size, index)
        tokens, seconds, worth = weigh(price, slots, depth, owner == index, at.target)
        alone = Prediction(at.plain.tokens + tokens, at.plain.seconds + seconds)
        if looked_up is not None:
            offered, lookup, finder = looked_up
            gain = weigh(price, offered, lookup, lookup < 0, at.target)[2]
            passes, drafting = 1 if slots.one_pass else int(depth.max()), max(1, int(np.count_nonzero(depth)))
            share_s = (slots.start_s + slots.pass_s * passes) / drafting
            taken = (lookup > 0) & (gain > np.where(depth > 0, worth - share_s, 0.0))
            if taken.any() and (cap[~taken] > 0).any():
                rest, rows = slots._replace(cap=np.where(taken, 0, cap)), at.target.rows + float(lookup[taken].sum())
                others = fill(price, rest, self._levels, self._uniform, at.target._replace(rows=rows))
                both, joint = np.where(taken, lookup, others), _instead(slots, offered, taken)
                more, more_s, _ = weigh(price, joint, both, ~taken, at.target)
                if (more - tokens) * price > more_s - seconds:
                    slots, depth, owner, tokens, seconds = joint, both, np.where(taken, finder, owner), more, more_s
        drafts = (depth > 0) & (owner == index)
        long_run = Prediction(at.plain.tokens + tokens, at.plain.seconds + seconds)
        settled = Prediction(long_run.tokens, long_run.seconds - float(slots.read_s[drafts].sum()))
        return Candidate(depth, owner, long_run, settled, float(reads_s[drafts].sum()), alone, context)

    def _look_up(self, price: float, at: Situation) -> tuple[Slots, Ints, Ints] | None:
        """What lookups have on offer, how much of it pays [B], and whose it is for each request [B]."""
        slots: Slots | None = None
        owner, longest = np.zeros_like(at.cap), int(at.cap.max())
        for index, traits in enumerate(self._traits):
            offers = at.view.offers[index]
            if offers is None and len(self._traits) == 1:  # one that does not say may find any
                offers = ((1, longest),) * at.cap.size
            if runs_model(traits) or offers is None:
                continue
            match, tokens = np.array(offers, dtype=np.int64).reshape(-1, 2).T
            cap, signal = np.minimum(at.cap, np.where(match > 0, tokens, 0)), match_signals(match, longest)
            one = self._slots(index, at, cap, np.zeros(cap.size), signal=signal)
            better = np.ones(cap.size, np.bool_) if slots is None else one.survival.sum(1) > slots.survival.sum(1)
            slots, owner = one if slots is None else _instead(slots, one, better), np.where(better, index, owner)
        if slots is None or not slots.cap.any():
            return None
        return slots, fill(price, slots, self._levels, self._uniform, at.target), owner

    def _slots(
        self, index: int, at: Situation, cap: Ints, read_s: Floats, hope: float = 0.0, signal: Floats | None = None
    ) -> Slots:
        traits, (start_s, pass_s, row_s, _) = self._traits[index], self._costs.draft_terms(index)
        survival = self._models[index].planned_survival(at.slots, cap, int(at.cap.max()), signal, hope=hope)
        start_s = -pass_s if traits.idle_pass else start_s  # every step pays for the first pass
        one_pass = traits.passes_per_draft == "one"
        return Slots(survival, cap, row_s + self._costs.seen_s * at.context, read_s, start_s, pass_s, one_pass)

    def least_match(self, index: int, price: float, at: Situation, instead_s: float) -> int:
        """Shortest match with which what a lookup may offer brings a request more than ``instead_s``."""
        longest, nobody = int(at.cap.max()), np.full(_MATCHES.size, -1)
        signal = match_signals(_MATCHES, longest)
        survival = self._models[index].planned_survival(nobody, np.full(_MATCHES.size, longest), longest, signal)
        row_s = row_price_s(*at.target, 1.0) + self._costs.seen_s * float(at.context.mean())
        pays = np.maximum(survival * price - row_s, 0.0).sum(axis=1) > instead_s
        return int(_MATCHES[pays.argmax()]) if pays.any() else _NEVER


def _instead(slots: Slots, other: Slots, taken: npt.NDArray[np.bool_]) -> Slots:
    """``other`` for the requests ``taken``; passes stay those of ``slots``."""
    return slots._replace(
        survival=np.where(taken[:, None], other.survival, slots.survival),
        cap=np.where(taken, other.cap, slots.cap),
        row_s=np.where(taken, other.row_s, slots.row_s),
        read_s=np.where(taken, other.read_s, slots.read_s),
    )
