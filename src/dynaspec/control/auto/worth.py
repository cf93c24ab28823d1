"""What a token is worth, and the draft lengths that follow from it.

At the best possible goodput λ a token is worth 1/λ seconds, and λ follows from the lengths that this leads to
(Dinkelbach's method, see ``lengths``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def best_lengths(
    drafters: Sequence[Drafter],
    asked: Sequence[int],
    view: StepView,
    situation: Situation,
    costs: StepCosts,
    host_s: float,
    value: float,
) -> Lengths:
    """The lengths that bring most where a token is worth ``value`` seconds.

    Args:
        drafters, asked: see ``routing.route``.
        situation: its ``value`` is changed.
        host_s: seconds of a step beside its passes.
    """
    requests, context = len(view.ids), float(sum(view.context_len))
    situation.value = value
    wish, owner = route(drafters, asked, view, situation)
    seconds = wish.seconds + costs.pass_s(requests + wish.rows, context + wish.context, context) + host_s
    return Lengths(wish, owner, seconds, (requests + wish.hoped) / seconds)


def settle(lengths: Callable[[float], Lengths], value: float, correction: float, plain: float) -> tuple[Lengths, float]:
    """Lengths and the value of a token that go together.

    Args:
        lengths: at a value.
        value: to begin with, seconds.
        correction: what drafting gave over what was hoped, in the steps before.
        plain: tokens a second of plain decoding.
    """
    for _ in range(_ROUNDS):
        found = lengths(value)
        most = max(found.hoped * correction, plain)
        settled = abs(most * value - 1.0) < _SETTLED
        value = 1.0 / most
        if settled:
            break
    return found, value


def nearly(lengths: Callable[[float], Lengths], value: float, *, drafting: bool) -> Lengths:
    """The fastest lengths of those that would nearly pay; none, if none would.

    Args:
        lengths: at a value, for drafts that have been started.
        drafting: goes on.
    """
    candidates = [lengths(value * times) for times in _NEARLY[: 1 if drafting else None]]
    return max(candidates, key=lambda found: (found.wish.rows > 0.0) * found.hoped)
