"""What ``auto`` knows of each proposer: how likely its tokens are accepted, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynaspec.contract.costs import Curve
from dynaspec.contract.step import ProposerTraits, StepView, StopRule, Work

from .acceptance import POSITIONS, AcceptanceModel, Observations, logit, logits
from .curve import KNOTS, CostCurve
from .draft_cost import DraftCost
from .lengths import chain_depths, expected_tokens, lookup_depths, survivals

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_MODEL_BIAS, _LOOKUP_BIAS = 0.85, 0.0
"""Chance of a first slot before anything is known, as a logit: 0.7 and 0.5."""
_CONFIDENCE_WEIGHT, _MATCH_WEIGHT = 0.7, 0.5
_HORIZON = 32
"""Steps over which reading what the drafter lacks is paid off, if the request has so many left."""


@dataclass(slots=True)
class Wish:
    """What one proposer would be asked for. B requests."""

    depth: Ints
    """[B]"""
    worth: Floats
    """[B] seconds gained by drafting for each request."""
    hoped: float
    """Accepted tokens over all requests, if acceptance is as good as it may well be: what decisions rest on."""
    expected: float
    """The same at the best estimate: what steps are held against."""
    seconds: float
    """Of drafting."""
    rows: float
    """Drafted tokens over all requests."""


@dataclass(slots=True)
class Situation:
    """A step to plan, as every proposer sees it. B requests."""

    places: Ints
    """[B]"""
    cap: Ints
    """[B] longest draft possible."""
    runnable: Bools
    """[longest + 1] draft lengths that the host can run."""
    value: float
    """Seconds that a token is worth."""
    optimism: float
    """Standard deviations that acceptance is hoped to be better than estimated."""
    target: CostCurve
    base_rows: float
    """Rows of the target pass without drafts."""


class Drafter(Protocol):
    """One proposer of the host."""

    stops: bool
    """Its drafts can end by a rule between passes."""

    def grow(self, places: int) -> None:
        """Makes room for requests."""
        ...

    def admit(self, place: int, expected: float | None) -> None:
        """A new request takes a place."""
        ...

    def caps(self, view: StepView, cap: Ints) -> Ints:
        """[B] ``cap``, cut to what the proposer has on offer."""
        ...

    def catching_up(self, view: StepView) -> Floats:
        """[B] seconds to process what the proposer has not seen of each request."""
        ...

    def wish(self, view: StepView, situation: Situation) -> Wish:
        """The draft lengths that pay."""
        ...

    def rule(self, situation: Situation) -> StopRule | None:
        """When to end the drafts of the latest wish early; None where they cannot."""
        ...

    def survivals(self, view: StepView, places: Ints, requests: Ints, lens: Ints, confidence: Floats) -> Floats:
        """[N] chances that each drafted token and all before it are accepted.

        Args:
            places: [b] of those drafted for.
            requests: [b] their indices in the view.
            lens: [b]
            confidence: [N]
        """
        ...

    def observe(self, position: Ints, place: Ints, accepted: Floats, confidence: Floats, offer: Ints) -> None:
        """Learns from N verified slots; ``offer`` [N] is the match length that the draft came from."""
        ...

    def spent(self, work: Work, drafting: int, seconds: float) -> None:
        """A step drafted with this proposer alone, for so many requests."""
        ...

    def age(self, steps: int) -> None:
        """So many steps have passed."""
        ...

    def document(self) -> dict[str, Any]:
        """What it believes, as plain JSON values."""
        ...


class ModelDrafter:
    """A proposer that runs a model: a pass for each token, or one for all."""

    def __init__(
        self,
        traits: ProposerTraits,
        index: int,
        start: Curve,
        rates: Sequence[float],
        can_stop: bool,
    ) -> None:
        """
        Args:
            index: among the host's proposers.
            start: its passes at start-up, (rows, seconds).
            rates: acceptance per position of a saved profile; empty = unknown.
        """
        self.stops = can_stop and traits.has_confidence and traits.passes_per_draft == "per_token"
        self._confident = traits.has_confidence
        self._single_pass = traits.passes_per_draft == "one"
        self._index = index
        self._cost = DraftCost(start, model=True)
        self._prior = AcceptanceModel(weight=0.0, bias=_MODEL_BIAS)
        self._informed = AcceptanceModel(weight=_CONFIDENCE_WEIGHT, bias=0.0)
        for position, rate in enumerate(conditional(rates)[:POSITIONS]):
            self._prior.bias[position:] = logit(rate)

    def grow(self, places: int) -> None:
        self._prior.grow(places)
        self._informed.grow(places)

    def admit(self, place: int, expected: float | None) -> None:
        self._prior.admit(place, expected)
        self._informed.admit(place, None)

    def caps(self, view: StepView, cap: Ints) -> Ints:
        return cap

    def catching_up(self, view: StepView) -> Floats:
        return self._cost.per_row_caught_up * np.array(view.lag[self._index], dtype=np.float64)

    def wish(self, view: StepView, situation: Situation) -> Wish:
        requests = situation.cap.size
        depth, worth = np.empty(requests, np.int64), np.empty(requests)
        self._cost.suppose(situation.target.at(1.0))
        call, each = self._call_and_pass()
        offset = self._prior.offset[situation.places]
        hoped, passes, lag_s, rows = chain_depths(
            self._prior.hopeful(situation.optimism),
            offset,
            situation.cap,
            situation.runnable,
            self.catching_up(view) / np.clip(np.array(view.room_depth) / 2.0, 1.0, _HORIZON),
            situation.value,
            call,
            each,
            self._cost.per_row,
            KNOTS,
            situation.target.seconds,
            situation.base_rows,
            depth,
            worth,
        )
        drafted = rows - situation.base_rows
        seconds = call + each * passes + self._cost.per_row * drafted + lag_s if passes else 0.0
        expected = expected_tokens(0.0, self._prior.bias, offset, offset, depth)
        return Wish(depth, worth, hoped, expected, seconds, drafted)

    def rule(self, situation: Situation) -> StopRule | None:
        if not self.stops:
            return None
        _, each = self._call_and_pass()
        requests = situation.cap.size
        rows = situation.base_rows + requests
        slope = (situation.target.at(rows + requests) - situation.target.at(rows)) / requests
        positions = np.minimum(np.arange(1, max(2, int(situation.cap.max()))), POSITIONS - 1)
        worth = situation.value / (1.0 + np.exp(-self._prior.bias[positions]))
        return StopRule(
            below=tuple(((self._cost.per_row + slope) / worth).tolist()),
            total_below=tuple((each / worth).tolist()),
            scope="request",
            signal="survival",
            weight=float(self._informed.weight[0]),
            bias=tuple(self._informed.bias.tolist()),
            offset=tuple(self._informed.offset[situation.places].tolist()),
        )

    def survivals(self, view: StepView, places: Ints, requests: Ints, lens: Ints, confidence: Floats) -> Floats:
        model = self._informed if self._confident else self._prior
        feature = logits(confidence) if self._confident else np.zeros(int(lens.sum()))
        chances: Floats = survivals(float(model.weight[0]), model.bias, model.offset[places], feature, lens)
        return chances

    def observe(self, position: Ints, place: Ints, accepted: Floats, confidence: Floats, offer: Ints) -> None:
        self._prior.observe(Observations(np.zeros(position.size), position, place, accepted))
        if self._confident:
            self._informed.observe(Observations(logits(confidence), position, place, accepted))

    def spent(self, work: Work, drafting: int, seconds: float) -> None:
        self._cost.observe(work, drafting, seconds)

    def age(self, steps: int) -> None:
        self._prior.age(steps)
        self._informed.age(steps)

    def document(self) -> dict[str, Any]:
        return {
            "acceptance": [round(self._prior.chance(j), 4) for j in range(POSITIONS)],
            "survival": {"weight": float(self._informed.weight[0]), "bias": self._informed.bias.tolist()},
            "cost": {
                "call_s": self._cost.call,
                "pass_s": self._cost.per_pass,
                "row_s": self._cost.per_row,
                "caught_up_row_s": self._cost.per_row_caught_up,
            },
        }

    def _call_and_pass(self) -> tuple[float, float]:
        if self._single_pass:
            return self._cost.call + self._cost.per_pass, 0.0
        return self._cost.call, self._cost.per_pass


class LookupDrafter:
    """A proposer that looks drafts up and says before planning what it has found."""

    stops = False

    def __init__(self, index: int, rates: Sequence[float]) -> None:
        """See ``ModelDrafter``."""
        self._index = index
        self._cost = DraftCost((), model=False)
        self._model = AcceptanceModel(weight=_MATCH_WEIGHT, bias=_LOOKUP_BIAS)
        for position, rate in enumerate(conditional(rates)[:POSITIONS]):
            self._model.bias[position:] = logit(rate)

    def grow(self, places: int) -> None:
        self._model.grow(places)

    def admit(self, place: int, expected: float | None) -> None:
        self._model.admit(place, expected)

    def caps(self, view: StepView, cap: Ints) -> Ints:
        offers = view.offers[self._index]
        if offers is None:
            return cap
        return np.minimum(cap, [found if match else 0 for match, found in offers])

    def catching_up(self, view: StepView) -> Floats:
        return np.zeros(len(view.ids))

    def wish(self, view: StepView, situation: Situation) -> Wish:
        depth, worth = np.empty(situation.cap.size, np.int64), np.empty(situation.cap.size)
        weight, feature = float(self._model.weight[0]), self._features(view)
        offset = self._model.offset[situation.places]
        hoped, rows = lookup_depths(
            weight,
            self._model.hopeful(situation.optimism),
            offset,
            feature,
            self.caps(view, situation.cap),
            situation.value,
            KNOTS,
            situation.target.seconds,
            situation.base_rows,
            depth,
            worth,
        )
        expected = expected_tokens(weight, self._model.bias, offset, feature, depth)
        return Wish(depth, worth, hoped, expected, self._cost.call if hoped else 0.0, rows - situation.base_rows)

    def rule(self, situation: Situation) -> StopRule | None:
        return None

    def survivals(self, view: StepView, places: Ints, requests: Ints, lens: Ints, confidence: Floats) -> Floats:
        feature = np.repeat(self._features(view)[requests], lens)
        model = self._model
        chances: Floats = survivals(float(model.weight[0]), model.bias, model.offset[places], feature, lens)
        return chances

    def observe(self, position: Ints, place: Ints, accepted: Floats, confidence: Floats, offer: Ints) -> None:
        self._model.observe(Observations(match_feature(offer), position, place, accepted))

    def spent(self, work: Work, drafting: int, seconds: float) -> None:
        self._cost.observe(work, drafting, seconds)

    def age(self, steps: int) -> None:
        self._model.age(steps)

    def document(self) -> dict[str, Any]:
        return {
            "acceptance": [round(self._model.chance(j), 4) for j in range(POSITIONS)],
            "survival": {"weight": float(self._model.weight[0]), "bias": self._model.bias.tolist()},
            "cost": {"call_s": self._cost.call, "pass_s": 0.0, "row_s": 0.0},
        }

    def _features(self, view: StepView) -> Floats:
        offers = view.offers[self._index] or ((1, 0),) * len(view.ids)
        return match_feature(np.array([match for match, _ in offers], dtype=np.int64))


def match_feature(match: Ints) -> Floats:
    """The longer the match, the surer: log₂ of its length over 2."""
    return np.asarray(np.log2(np.maximum(match, 1) / 2.0))


def conditional(rates: Sequence[float]) -> list[float]:
    """Conditional acceptance from unconditional rates per position."""
    before, chances = 1.0, []
    for rate in rates:
        chances.append(rate / before if before > 0.0 else 0.0)
        before = rate
    return chances
