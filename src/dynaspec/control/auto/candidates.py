"""What each proposer would draft in a step, for which request, and what that is expected to give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import Limits, StepView
from dynaspec.control.estimate.costs import StepCosts

from ..estimate.acceptance import AcceptanceModel, LookupModel
from ..estimate.settings import AutoSettings
from .explore import Prediction
from .lengths import Slots, Target, fill, own_prices, weigh

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Drafts of a step. B requests."""

    depth: Ints
    """[B] lengths that pay."""
    owner: Ints
    """[B] proposers."""
    expected: Prediction
    priced: Prediction
    """What a token's price follows from: such steps without lookups. Stretches that repeat the text come and go, and a
    price that was right in one is wrong behind it."""
    probe_context: int = 0
    """See ``SpecPlan``."""


@dataclass(frozen=True, slots=True)
class PlanningContext:
    """A step to plan, in columns of B requests."""

    view: StepView
    slots: Ints
    """Rows in the acceptance models."""
    cap: Ints
    """Longest draft possible."""
    room: Floats
    """Tokens that each request still has."""
    seen_s: Floats
    """Seconds that a row takes to see the context of each request."""
    target: Target
    plain: Prediction
    """Of plain decoding."""


class Candidates:
    """Weighs what drafts bring against what they take.

    Args:
        models, lookups: of acceptance, by proposer.
        levels: draft lengths that can run, above 0.
    """

    def __init__(
        self,
        limits: Limits,
        models: Mapping[int, AcceptanceModel],
        lookups: Mapping[int, LookupModel],
        costs: StepCosts,
        levels: Ints,
        settings: AutoSettings,
    ) -> None:
        self._traits, self._models, self._lookups, self._costs = limits.proposers, models, lookups, costs
        self._levels, self._uniform, self._settings = levels, not limits.ragged, settings

    def of(self, price: float, at: PlanningContext) -> dict[int, Candidate]:
        """By proposer, the drafts that bring most at a token price; at least one token, even if it does not pay."""
        found, offers = {}, self._offers(at)
        if offers is not None:
            owner, slots = offers
            depth = fill(slots, self._levels, self._uniform, at.target)
            tokens, seconds, _, brings = weigh(price, slots, depth, at.target)
            # What lookups offer changes in every step, which is planned anew.
            step = Prediction(at.plain.tokens + tokens, at.plain.seconds + seconds + self._costs.planning_s)
            priced = step if len(self._traits) == 1 else at.plain
            found[int(owner[depth.argmax()])] = Candidate(depth, owner, step, priced)
            offers = (np.where(depth > 0, owner, -1), slots._replace(read_s=brings))
        for index in self._models:
            found[index] = self._draft(index, price, at, offers)
        return found

    def probe(self, index: int, price: float, at: PlanningContext) -> Candidate:
        """Of a model: what may well pay, which tells more than what loses least, with as little to read as can be."""
        return self._draft(index, price, at, None, probe=True)

    def _draft(
        self, index: int, price: float, at: PlanningContext, offers: tuple[Ints, Slots] | None, *, probe: bool = False
    ) -> Candidate:
        """What a model drafts; lookups draft for the requests to which they bring more, if that pays on the whole.

        Args:
            offers: [B] proposers whose lookups pay, or −1; those, with what they bring in the place of ``read_s``.
        """
        start_s, pass_s, row_s, read_in_s = self._costs.draft_terms(index)
        traits, on = self._traits[index], self._settings
        lag, cap, context = np.array(at.view.lag[index], dtype=np.float64), at.cap, 0
        if traits.longest is not None:
            cap = np.minimum(cap, traits.longest)
        reads, steps = lag, np.minimum(np.maximum(at.room / 2.0, 1.0), on.pay_off)  # that reading is paid off over
        if probe:
            # What takes no more than the latest tokens in each step of the probe is read to its end.
            short, steps = lag <= on.probe * on.probe_context, np.full(cap.size, float(on.probe))
            if traits.probe_context and short.any():
                cap = np.where(short, cap, 0)
            elif traits.probe_context:
                context, cap, steps = on.probe_context, np.minimum(cap, 1), np.ones(cap.size)
                reads = np.full(cap.size, float(context))
        reads_s = reads * read_in_s
        read_s = reads_s / steps
        model, longest = self._models[index], int(at.cap.max())
        survival = model.survival(at.slots, cap, longest)
        start_s = -pass_s if traits.idle_pass else start_s  # every step pays for the first pass
        runs, one_pass = np.ones(cap.size, np.bool_), traits.passes_per_draft == "one"
        worth = np.full(cap.size, price * on.probe_price if probe else price)
        slots = Slots(worth, survival, cap, row_s + at.seen_s, read_s, runs, start_s, pass_s, one_pass)
        depth, owner = fill(slots, self._levels, self._uniform, at.target), np.full(cap.size, index)
        tokens, seconds, spread_s, brings = weigh(price, slots, depth, at.target)
        priced = Prediction(at.plain.tokens + tokens, at.plain.seconds + seconds)
        if offers is not None:
            looked_up = (offers[0] >= 0) & (offers[1].read_s > brings)
            if looked_up.any() and (cap[~looked_up] > 0).any():
                joint = _instead(slots, offers[1], looked_up)
                both = fill(joint, self._levels, self._uniform, at.target)
                more, more_s, spread, _ = weigh(price, joint, both, at.target)
                more_s += self._costs.planning_s
                if (more - tokens) * price > more_s + spread - seconds - spread_s:
                    depth, owner = both, np.where(looked_up, offers[0], owner)
                    tokens, seconds = more, more_s
        drafts = (depth > 0) & (owner == index)
        reading_s = float(reads_s @ drafts)
        again_s = reading_s if context else 0.0  # what is not read to its end is read in each step
        step = Prediction(at.plain.tokens + tokens, at.plain.seconds + seconds + again_s, reading_s - again_s)
        return Candidate(depth, owner, step, priced, context)

    def _offers(self, at: PlanningContext) -> tuple[Ints, Slots] | None:
        """[B] Proposers that offer what is likeliest to be accepted, and that; None where there is nothing."""
        found: tuple[Ints, Slots] | None = None
        for index, lookup in self._lookups.items():
            offers = at.view.offers[index]
            if offers is None and len(self._traits) == 1:  # one that does not say may find any
                offers = tuple((1, most) for most in at.cap.tolist())
            if offers is None:
                continue
            match, tokens = np.array(offers, dtype=np.int64).T
            cap, nothing = np.minimum(at.cap, np.where(match > 0, tokens, 0)), np.zeros(match.size)
            survival = lookup.survival(at.slots, match.copy(), cap, int(at.cap.max()))
            row_s, owner = self._costs.draft_terms(index)[2] + at.seen_s, np.full(cap.size, index)
            worth = own_prices(survival, cap, row_s, at.target, at.plain.seconds)
            one = Slots(worth, survival, cap, row_s, nothing, nothing > 0.0, 0.0, 0.0, False)
            if found is not None:
                better = one.survival.sum(1) > found[1].survival.sum(1)
                owner, one = np.where(better, owner, found[0]), _instead(found[1], one, better)
            found = owner, one
        return found if found is not None and found[1].cap.any() else None


def _instead(slots: Slots, other: Slots, taken: npt.NDArray[np.bool_]) -> Slots:
    """``other`` for the requests ``taken``; passes stay those of ``slots``."""
    return slots._replace(
        price=np.where(taken, other.price, slots.price),
        survival=np.where(taken[:, None], other.survival, slots.survival),
        cap=np.where(taken, other.cap, slots.cap),
        row_s=np.where(taken, other.row_s, slots.row_s),
        read_s=np.where(taken, 0.0, slots.read_s),
        runs=slots.runs & ~taken,
    )
