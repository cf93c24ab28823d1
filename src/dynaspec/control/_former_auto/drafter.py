"""What ``auto`` knows of each proposer: how likely its tokens are accepted, and which lengths pay at what they cost.

Those that run a model are here, look-ups in ``lookup_drafter``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import ProposerTraits, StepView, StopRule

from .acceptance import POSITIONS, AcceptanceModel, Verdicts, conditional, logit
from .costs import StepCosts
from .lengths import chain_depths, reading_s, stop_thresholds, survivals

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_MODEL_BIAS = 0.85
"""Chance of a first slot before anything is known, as a logit: 0.7."""
_GOOD = 2.2
"""The same of a drafter as good as they get: 0.9."""
_EVIDENCE_WEIGHT = 1.0
GLIMPSE = 32
"""Latest tokens that a trial reads of a request, where the proposer can do with so few."""
_GLIMPSE_LOSS, _GLIMPSE_VARIANCE = 0.33, 0.02
"""How much less likely a token drafted from them alone is right, as a logit, and how uncertain that is; the demo pair's
are in 0.80 of all cases instead of 0.85."""
HORIZON = 32.0
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
    horizon: float = HORIZON
    """Most steps to pay off what a drafter has to read."""
    started: bool = False
    """Drafting goes on whatever it brings: what starting it takes ends no draft."""


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

    def reading_s(self, view: StepView, request: int) -> float:
        """Seconds to read all that it lacks of a request of the view, as a share of each step that is left to that."""
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

    def observe(self, seen: Verdicts, evidence: Floats, basis: Ints) -> None:
        """Learns from verified slots.

        Args:
            evidence: [N] of the tokens.
            basis: [B] what drafts rested on: for look-ups, the length of the match they were found by; for a model,
                the tokens of the request that it lacked as it was tried, 0 in other steps.
        """
        ...

    def chance(self) -> float:
        """Of the first token of a draft for a request like the average."""
        ...

    def doubt(self) -> None:
        """What came of its drafts was hard to believe: what is believed of it may hold no longer."""
        ...

    def age(self, steps: int, drafting: int) -> None:
        """So many steps have passed, of which so many drafted."""
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
        self._glimpses = traits.probe_context
        self._index = index
        self._cost, self._target = costs.drafters[index], costs.target
        self._prior = AcceptanceModel(_GLIMPSE_LOSS, _MODEL_BIAS, weight_variance=_GLIMPSE_VARIANCE)
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

    def reading_s(self, view: StepView, request: int) -> float:
        lag, room = view.lag[self._index][request], view.room_depth[request]
        return reading_s(float(self._cost[3]), lag, room, HORIZON)

    def wish(self, view: StepView, situation: Situation) -> Wish:
        return self._wish(situation, self._prior.bias, self._prior.offset, np.array(view.lag[self._index]))

    def best(self, view: StepView, situation: Situation) -> Wish:
        none = np.zeros_like(situation.cap)  # it would have kept up
        return self._wish(situation, np.full(POSITIONS, _GOOD), np.zeros_like(self._prior.offset), none)

    def _wish(self, situation: Situation, bias: Floats, offset: Floats, lag: Ints) -> Wish:
        requests = situation.cap.size
        wish = Wish(np.empty(requests, np.int64), np.empty(requests))
        cost, start_s = self._marginal_cost(), 0.0
        if situation.started:
            start_s = max(0.0, float(cost[0] + cost[4]))  # less than nothing where the first pass runs anyway
            cost = np.array((float(cost[0] + cost[4]) - start_s, *cost[1:4], 0.0))
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
            situation.horizon,
            situation.context,
            situation.value,
            cost,
            self._single_pass,
            self._target,
            situation.base_rows,
            wish.depth,
            wish.worth,
        )
        wish.seconds += start_s if wish.rows else 0.0
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

    def observe(self, seen: Verdicts, evidence: Floats, basis: Ints) -> None:
        glimpsed = (basis > GLIMPSE) & self._glimpses
        self._prior.observe(seen, np.repeat(-1.0 * glimpsed, seen.drafted))
        if self._confident:
            self._informed.observe(seen, evidence)

    def chance(self) -> float:
        return self._prior.chance(0)

    def doubt(self) -> None:
        self._prior.doubt()
        self._informed.doubt()

    def age(self, steps: int, drafting: int) -> None:
        self._prior.age(steps, drafting)
        self._informed.age(steps, drafting)

    def document(self) -> dict[str, Any]:
        call, one, row, ingested, reload = self._cost.tolist()
        return {
            "acceptance": [round(self._prior.chance(j), 4) for j in range(POSITIONS)],
            "survival": {"weight": float(self._informed.weight[0]), "bias": self._informed.bias.tolist()},
            "cost": {"call_s": call, "pass_s": one, "row_s": row, "caught_up_row_s": ingested, "reload_s": reload},
        }
