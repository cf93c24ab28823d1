"""What ``auto`` knows of each proposer: how likely its tokens are accepted, and which lengths pay at what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import ProposerTraits, StepView, StopRule

from ..planner import MAX_DRAFT_TOKENS
from .acceptance import POSITIONS, AcceptanceModel, Verdicts, conditional, logit
from .costs import StepCosts
from .lengths import chain_depths, lookup_depths, match_features, stop_thresholds, survivals

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_MODEL_BIAS, _LOOKUP_BIAS = 0.85, 0.25
"""Chance of a first slot before anything is known, as a logit: 0.7, and 0.56 for a match of two tokens."""
_GOOD = 2.2
"""The same of a drafter as good as they get: 0.9."""
_EVIDENCE_WEIGHT, _MATCH_WEIGHT = 1.0, 0.8
_MATCH_VARIANCE = 0.02
"""Of the weight of a match's length. That longer ones are right more often holds for any text: were it open, a single
long one that was wrong would end look-ups for good, as who is not asked is not learnt of."""
_UNTRIED_FINDS, _UNTRIED_LENGTH = 2, 4
"""The first drafts that are looked up are short, however much was found."""
GLIMPSE = 32
"""Latest tokens that a trial reads of a request, where the proposer can do with so few."""
_HORIZON = 32.0
"""Steps over which reading what the drafter lacks is paid off, if the request has so many left."""


@dataclass(slots=True)
class Wish:
    """What one proposer would be asked for. B requests."""

    depth: Ints
    """[B]"""
    worth: Floats
    """[B] seconds gained by drafting for each request."""
    hoped: float = 0.0
    """Accepted tokens over all requests, if acceptance is as good as it may well be: what decisions rest on."""
    expected: float = 0.0
    """The same at the best estimate: what steps are held against."""
    seconds: float = 0.0
    """Of drafting."""
    rows: float = 0.0
    """Drafted tokens over all requests."""
    context: float = 0.0
    """KV entries that their rows see."""


@dataclass(slots=True)
class Situation:
    """A step to plan, as every proposer sees it. B requests."""

    places: Ints
    """[B]"""
    cap: Ints
    """[B] longest draft possible."""
    room: Ints
    """[B] tokens that each request still has."""
    context: Ints
    """[B] KV entries that a row of each request sees."""
    runnable: Bools
    """[longest + 1] draft lengths that the host can run."""
    value: float
    """Seconds that a token is worth."""
    optimism: float
    """Standard deviations that acceptance is hoped to be better than estimated."""
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

    def retire(self, places: Ints) -> None:
        """The requests at these places have ended."""
        ...

    def caps(self, view: StepView, cap: Ints) -> Ints:
        """[B] ``cap``, cut to what the proposer has on offer."""
        ...

    def catching_up(self, view: StepView) -> Floats:
        """[B] seconds to read what a trial has to of each request."""
        ...

    def wish(self, view: StepView, situation: Situation) -> Wish:
        """The draft lengths that pay."""
        ...

    def best(self, view: StepView, situation: Situation) -> Wish:
        """What it would be asked for if it were as good as drafters get, whatever is believed of it."""
        ...

    def rule(self, situation: Situation) -> StopRule | None:
        """When to end the drafts of the latest wish early; None where they cannot."""
        ...

    def survivals(
        self, view: StepView, places: Ints, requests: Ints, lens: Ints, evidence: Floats, echo: Floats
    ) -> Floats:
        """[N] chances that each drafted token and all before it are accepted, as known before it was drawn.

        Args:
            places: [b] of those drafted for.
            requests: [b] their indices in the view.
            lens: [b]
            evidence, echo: [N] see ``DraftView``.
        """
        ...

    def observe(self, seen: Verdicts, evidence: Floats, match: Ints) -> None:
        """Learns from verified slots; ``evidence`` [N] of the tokens, ``match`` [B] the lengths they were found by."""
        ...

    def chance(self) -> float:
        """Of the first token of a draft for a request like the average."""
        ...

    def doubt(self) -> None:
        """What came of its drafts was hard to believe: what is believed of it may hold no longer."""
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
        self, traits: ProposerTraits, index: int, costs: StepCosts, rates: Sequence[float], can_stop: bool
    ) -> None:
        """
        Args:
            index: among the host's proposers.
            rates: acceptance per position of a saved profile; empty = unknown.
        """
        self.stops = can_stop and traits.has_confidence and traits.passes_per_draft == "per_token"
        self._confident = traits.has_confidence
        self._single_pass = traits.passes_per_draft == "one"
        self._idle_pass = traits.idle_pass
        self._glimpses = traits.glimpses
        self._index = index
        self._cost, self._target = costs.drafters[index], costs.target
        self._prior = AcceptanceModel(0.0, _MODEL_BIAS)
        self._informed = AcceptanceModel(_EVIDENCE_WEIGHT, 0.0)
        for position, rate in enumerate(conditional(rates)[:POSITIONS]):
            self._prior.bias[position:] = logit(rate)

    def grow(self, places: int) -> None:
        self._prior.grow(places)
        self._informed.grow(places)

    def admit(self, place: int, expected: float | None) -> None:
        self._prior.admit(place, expected)
        self._informed.admit(place, None)

    def retire(self, places: Ints) -> None:
        self._prior.retire(places)
        self._informed.retire(places)

    def caps(self, view: StepView, cap: Ints) -> Ints:
        return cap

    def catching_up(self, view: StepView) -> Floats:
        lag = np.array(view.lag[self._index], dtype=np.float64)
        return np.asarray(self._cost[3] * (np.minimum(lag, GLIMPSE) if self._glimpses else lag))

    def wish(self, view: StepView, situation: Situation) -> Wish:
        return self._wish(situation, self._prior.bias, self._prior.offset, np.array(view.lag[self._index]))

    def best(self, view: StepView, situation: Situation) -> Wish:
        none = np.zeros_like(situation.cap)  # it would have kept up
        return self._wish(situation, np.full(POSITIONS, _GOOD), np.zeros_like(self._prior.offset), none)

    def _wish(self, situation: Situation, bias: Floats, offset: Floats, lag: Ints) -> Wish:
        requests = situation.cap.size
        wish = Wish(np.empty(requests, np.int64), np.empty(requests))
        wish.hoped, wish.expected, wish.seconds, wish.rows, wish.context = chain_depths(
            bias,
            self._prior.bias_var,
            situation.optimism,
            offset,
            situation.places,
            situation.cap,
            situation.runnable,
            lag,
            situation.room,
            _HORIZON,
            situation.context,
            situation.value,
            self._marginal_cost(),
            self._single_pass,
            self._target,
            situation.base_rows,
            wish.depth,
            wish.worth,
        )
        return wish

    def _marginal_cost(self) -> Floats:
        """The parts of what drafting costs beyond a step without it."""
        if not self._idle_pass:
            return self._cost
        cost = self._cost.copy()
        cost[0] -= cost[1]
        return cost

    def rule(self, situation: Situation) -> StopRule | None:
        if not self.stops:
            return None
        below, total_below = stop_thresholds(
            self._prior.bias,
            self._prior.bias_var,
            situation.optimism,
            situation.value,
            self._cost,
            self._target,
            situation.base_rows,
            situation.context,
            situation.cap,
        )
        return StopRule(
            below=tuple(below.tolist()),
            total_below=tuple(total_below.tolist()),
            scope="request",
            signal="survival",
            weight=float(self._informed.weight[0]),
            bias=tuple(self._informed.bias.tolist()),
            offset=tuple(self._informed.offset[situation.places].tolist()),
        )

    def survivals(
        self, view: StepView, places: Ints, requests: Ints, lens: Ints, evidence: Floats, echo: Floats
    ) -> Floats:
        model = self._informed if self._confident else self._prior
        chances: Floats = survivals(float(model.weight[0]), model.bias, model.offset[places], evidence, echo, lens)
        return chances

    def observe(self, seen: Verdicts, evidence: Floats, match: Ints) -> None:
        self._prior.observe(seen, np.zeros_like(evidence))
        if self._confident:
            self._informed.observe(seen, evidence)

    def chance(self) -> float:
        return self._prior.chance(0)

    def doubt(self) -> None:
        self._prior.doubt()
        self._informed.doubt()

    def age(self, steps: int) -> None:
        self._prior.age(steps)
        self._informed.age(steps)

    def document(self) -> dict[str, Any]:
        call, one, row, ingested, reload = self._cost.tolist()
        return {
            "acceptance": [round(self._prior.chance(j), 4) for j in range(POSITIONS)],
            "survival": {"weight": float(self._informed.weight[0]), "bias": self._informed.bias.tolist()},
            "cost": {"call_s": call, "pass_s": one, "row_s": row, "caught_up_row_s": ingested, "reload_s": reload},
        }


class LookupDrafter:
    """A proposer that looks drafts up and says before planning what it has found."""

    stops = False

    def __init__(self, index: int, costs: StepCosts, rates: Sequence[float]) -> None:
        """See ``ModelDrafter``."""
        self._index = index
        self._cost, self._target = costs.drafters[index], costs.target
        self._untried = _UNTRIED_FINDS
        self._model = AcceptanceModel(_MATCH_WEIGHT, _LOOKUP_BIAS, weight_variance=_MATCH_VARIANCE)
        for position, rate in enumerate(conditional(rates)[:POSITIONS]):
            self._model.bias[position:] = logit(rate)

    def grow(self, places: int) -> None:
        self._model.grow(places)

    def admit(self, place: int, expected: float | None) -> None:
        self._model.admit(place, expected)

    def retire(self, places: Ints) -> None:
        self._model.retire(places)

    def caps(self, view: StepView, cap: Ints) -> Ints:
        offers = view.offers[self._index]
        if offers is None:
            return cap
        return np.minimum(cap, [found if match else 0 for match, found in offers])

    def catching_up(self, view: StepView) -> Floats:
        return np.zeros(len(view.ids))

    def best(self, view: StepView, situation: Situation) -> Wish:
        return self.wish(view, situation)

    def wish(self, view: StepView, situation: Situation) -> Wish:
        return self.finds(self.offers(view), situation, np.zeros(situation.cap.size))

    def finds(self, offers: Ints, situation: Situation, instead: Floats) -> Wish:
        """``wish`` for requests to which it brings more than something else would.

        Args:
            offers: [B, 2] see ``offers``.
            instead: [B] seconds that the other would gain.
        """
        requests = situation.cap.size
        wish = Wish(np.empty(requests, np.int64), np.empty(requests))
        wish.hoped, wish.expected, wish.rows, wish.context = lookup_depths(
            float(self._model.weight[0]),
            self._model.bias,
            self._model.bias_var,
            situation.optimism,
            self._model.offset,
            situation.places,
            offers,
            np.minimum(situation.cap, _UNTRIED_LENGTH) if self._untried else situation.cap,
            situation.context,
            situation.value,
            instead,
            self._target,
            situation.base_rows,
            wish.depth,
            wish.worth,
        )
        wish.seconds = float(self._cost[0] + self._cost[4]) if wish.rows else 0.0
        return wish

    def rule(self, situation: Situation) -> StopRule | None:
        return None

    def survivals(
        self, view: StepView, places: Ints, requests: Ints, lens: Ints, evidence: Floats, echo: Floats
    ) -> Floats:
        feature = match_features(np.maximum(self.offers(view)[requests, 0], 1), lens)
        model = self._model
        none = np.zeros_like(feature)  # what was found was known before
        chances: Floats = survivals(float(model.weight[0]), model.bias, model.offset[places], feature, none, lens)
        return chances

    def observe(self, seen: Verdicts, evidence: Floats, match: Ints) -> None:
        self._untried = max(0, self._untried - int(((seen.place >= 0) & (seen.drafted > 0)).sum()))
        self._model.observe(seen, match_features(match, seen.drafted))

    def chance(self) -> float:
        return self._model.chance(0)

    def doubt(self) -> None:
        self._model.doubt()

    def age(self, steps: int) -> None:
        self._model.age(steps)

    def document(self) -> dict[str, Any]:
        return {
            "acceptance": [round(self._model.chance(j), 4) for j in range(POSITIONS)],
            "survival": {"weight": float(self._model.weight[0]), "bias": self._model.bias.tolist()},
            "cost": {"call_s": float(self._cost[0]), "pass_s": 0.0, "row_s": 0.0},
        }

    def offers(self, view: StepView) -> Ints:
        """[B, 2] length of each request's match, 0 = none; tokens on offer. A lookup that does not say may find any."""
        offers = view.offers[self._index]
        if offers is None:
            return np.full((len(view.ids), 2), (1, MAX_DRAFT_TOKENS))
        return np.array(offers, dtype=np.int64).reshape(-1, 2)
