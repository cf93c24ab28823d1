"""What ``auto`` knows of look-ups; what all that draft have in common is in ``drafter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import StepView, StopRule

from ..planner import MAX_DRAFT_TOKENS
from .acceptance import POSITIONS, AcceptanceModel, Verdicts, conditional, logit
from .costs import StepCosts
from .drafter import Situation, Wish
from .lengths import lookup_depths, match_features, survivals

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_BIAS = 0.25
"""Chance of a first slot before anything is known, as a logit: 0.56 for a match of two tokens."""
_MATCH_WEIGHT = 0.8
_MATCH_VARIANCE = 0.02
"""Of the weight of a match's length. That longer ones are right more often holds for any text: were it open, a single
long one that was wrong would end look-ups for good, as who is not asked is not learnt of."""
_UNTRIED_FINDS, _UNTRIED_LENGTH = 2, 4
"""The first drafts that are looked up are short, however much was found."""


class LookupDrafter:
    """A proposer that looks drafts up and says before planning what it has found."""

    stops = False

    def __init__(self, index: int, costs: StepCosts, rates: Sequence[float]) -> None:
        """See ``drafter.ModelDrafter``."""
        self._index = index
        self._cost, self._target = costs.drafters[index], costs.target
        self._untried = _UNTRIED_FINDS
        self._model = AcceptanceModel(_MATCH_WEIGHT, _BIAS, weight_variance=_MATCH_VARIANCE)
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

    def reading_s(self, view: StepView, request: int) -> float:
        return 0.0

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

    def observe(self, seen: Verdicts, evidence: Floats, basis: Ints) -> None:
        self._untried = max(0, self._untried - int(((seen.place >= 0) & (seen.drafted > 0)).sum()))
        self._model.observe(seen, match_features(basis, seen.drafted))

    def chance(self) -> float:
        return self._model.chance(0)

    def doubt(self) -> None:
        self._model.doubt()

    def age(self, steps: int, drafting: int) -> None:
        self._model.age(steps, drafting)

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
