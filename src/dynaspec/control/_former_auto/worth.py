"""What a token is worth, and the draft lengths that follow from it.

At the best possible goodput λ a token is worth 1/λ seconds, and λ follows from the lengths that this leads to
(Dinkelbach's method, see ``lengths``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import StepView

from .costs import StepCosts
from .drafter import Drafter, Situation, Wish
from .routing import route

Ints = npt.NDArray[np.int64]

_ROUNDS, _SETTLED = 2, 0.02
"""Times that lengths and the value of a token are fitted to each other, which go on from the last ones; and the share
by which they may differ."""
_NEARLY = (1.0, 1.2, 1.4)
"""Where no draft pays, the fastest counts of those that would if to start were free and a token worth so many times as
much. While drafting goes on, the first alone."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A step's draft lengths, and what is to be hoped of them."""

    wish: Wish
    owner: Ints | None
    """[B] proposers; None: the first for all."""
    seconds: float
    """Of the whole step."""
    hoped: float
    """Tokens a second, if acceptance is as good as it may well be."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Weighs what drafts of a step bring against what they take."""

    drafters: Sequence[Drafter]
    asked: Sequence[int]
    """Indices of those that may draft."""
    view: StepView
    situation: Situation
    """Its ``value`` and ``started`` change."""
    costs: StepCosts
    host_s: float
    """Seconds of a step beside its passes."""

    def settle(self, value: float, correction: float, plain: float) -> tuple[Lengths, float]:
        """Lengths and the value of a token that go together.

        Args:
            value: to begin with, seconds.
            correction: what drafting gave over what was hoped, in the steps before.
            plain: tokens a second of plain decoding.
        """
        for _ in range(_ROUNDS):
            found = self._lengths(value)
            most = max(found.hoped * correction, plain)
            settled = abs(most * value - 1.0) < _SETTLED
            value = 1.0 / most
            if settled:
                break
        return found, value

    def nearly(self, value: float, *, drafting: bool) -> Lengths:
        """The fastest lengths of those that would nearly pay; none, if none would.

        Args:
            drafting: goes on.
        """
        self.situation.started = True
        candidates = [self._lengths(value * times) for times in _NEARLY[: 1 if drafting else None]]
        self.situation.started = False
        return max(candidates, key=lambda found: (found.wish.rows > 0.0) * found.hoped)

    def best_goodput(self, value: float) -> float:
        """Tokens/s of the best lengths of one proposer if that were as good as they get."""
        self.situation.value, requests, goodput = value, len(self.view.ids), 0.0
        for index in self.asked:
            wish = self.drafters[index].best(self.view, self.situation)
            goodput = max(goodput, (requests + wish.expected) / self._step_s(wish))
        return goodput

    def gain_s(self, wish: Wish) -> float:
        """Seconds that drafts bring each request that has any on average, passes apart; at the present value."""
        requests, context = len(self.view.ids), float(self.situation.context.sum())
        with_drafts_s = self.costs.pass_s(requests + wish.rows, context + wish.context, context)
        rows_s = with_drafts_s - self.costs.pass_s(requests, context, context)
        return (wish.hoped * self.situation.value - rows_s) / max(1, int(np.count_nonzero(wish.depth)))

    def _lengths(self, value: float) -> Lengths:
        """Those that bring most where a token is worth ``value`` seconds."""
        self.situation.value = value
        wish, owner = route(self.drafters, self.asked, self.view, self.situation)
        seconds = self._step_s(wish)
        return Lengths(wish, owner, seconds, (len(self.view.ids) + wish.hoped) / seconds)

    def _step_s(self, wish: Wish) -> float:
        requests, context = len(self.view.ids), float(self.situation.context.sum())
        pass_s = self.costs.pass_s(requests + wish.rows, context + wish.context, context)
        return wish.seconds + pass_s + self.host_s
