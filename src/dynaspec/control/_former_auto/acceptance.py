"""How likely drafted tokens are to be accepted, learnt while decoding.

A slot's chance, given that all before it were accepted, is σ(weight · feature + bias[position] + offset[request]). The
three parts are fitted together by an extended Kalman filter with a diagonal covariance: one pass over the
observations, as much trust in each as the uncertainty of the parts allows, and a little forgetting, so that a drafter
that turns useless (or useful) is noticed within some ten drafts. Only what was verified teaches: the accepted tokens
and the first rejection; what lay behind it was never tested against the right context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from dynaspec.contract.step import LOGIT_RANGE

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

POSITIONS = 8
"""Positions with a bias of their own; later ones share the last."""
_LOWEST = 1.0 / (1.0 + np.exp(LOGIT_RANGE))

_WEIGHT_FLOOR, _BIAS_FLOOR, _OFFSET_FLOOR = 2e-4, 0.01, 0.05
"""Variances do not fall below these, or the filter would stop learning."""
_WEIGHT_DRIFT, _BIAS_DRIFT, _OFFSET_DRIFT = 2e-5, 2e-3, 5e-3
"""Variance that a step adds."""
_IDLE_DRIFT, _MOSTLY = 0.2, 1.1
"""Share of that in steps that drafted nothing, for positions that are mostly right (above the second, a logit): or some
hundred steps of plain decoding would leave no more of what is known than the last trial said. Others are forgotten."""
_WEIGHT_PRIOR, _BIAS_PRIOR, _OFFSET_PRIOR = 0.5, 1.0, 0.5
_TO_ALL = 0.15
"""Share of what a request's offset gives up, with time or as the request ends, that goes over to all: a drafter of no
use is not tried anew with every request."""
_LIKENESS = 0.02
"""A position of which nothing is known comes to be taken for like the one before, by this share a step: or drafts that
never get there would stay as short as the first guess has made them."""
_RETURN = 0.99
"""A request's offset goes back to the population's by this factor a step: one that was given up is tried again."""


@njit(cache=True, nogil=True)
def _sigmoid(z: float) -> float:
    return float(1.0 / (1.0 + np.exp(-z)))


@njit(cache=True, nogil=True)
def _filter(
    weight: Floats,
    bias: Floats,
    bias_var: Floats,
    offset: Floats,
    offset_var: Floats,
    place: Ints,
    drafted: Ints,
    tested: Ints,
    accepted: Ints,
    feature: Floats,
) -> None:
    """One observation after the other; ``weight`` is as in ``AcceptanceModel``, the others as in ``Verdicts``."""
    first = 0
    for request in range(place.size):
        r = place[request]
        for position in range(min(tested[request], drafted[request]) if r >= 0 else 0):
            j, x = min(position, bias.size - 1), feature[first + position]
            p = _sigmoid(weight[0] * x + bias[j] + offset[r])
            slope = max(p * (1.0 - p), 0.01)
            gain = 1.0 / (1.0 + slope * (x * x * weight[1] + bias_var[j] + offset_var[r]))
            error = (1.0 if position < accepted[request] else 0.0) - p
            weight[0] += weight[1] * x * error * gain
            bias[j] += bias_var[j] * error * gain
            offset[r] += offset_var[r] * error * gain
            weight[1] = max(_WEIGHT_FLOOR, weight[1] * (1.0 - weight[1] * x * x * slope * gain))
            # What is learnt of one position tells something of its neighbours, as long as little is known of them.
            for other in (j - 1, j + 1):
                if 0 <= other < bias.size:
                    bias[other] += 0.5 * bias_var[j] * bias_var[other] / _BIAS_PRIOR * error * gain
            bias_var[j] = max(_BIAS_FLOOR, bias_var[j] * (1.0 - bias_var[j] * slope * gain))
            offset_var[r] = max(_OFFSET_FLOOR, offset_var[r] * (1.0 - offset_var[r] * slope * gain))
        first += drafted[request]


@njit(cache=True, nogil=True)
def _age(
    weight: Floats, bias: Floats, bias_var: Floats, offset: Floats, offset_var: Floats, steps: int, drafting: int
) -> None:
    weight[1] = min(weight[2], weight[1] + steps * _WEIGHT_DRIFT)
    for j in range(bias_var.size):
        idle = (_IDLE_DRIFT if bias[j] > _MOSTLY else 1.0) * (steps - drafting)
        bias_var[j] = min(_BIAS_PRIOR, bias_var[j] + (drafting + idle) * _BIAS_DRIFT)
        if j:
            unknown = (bias_var[j] / _BIAS_PRIOR) ** 2
            bias[j] += (1.0 - (1.0 - _LIKENESS * unknown) ** steps) * (bias[j - 1] - bias[j])
    given_up = 0.0
    for r in range(offset.size):
        given_up += _TO_ALL * offset[r] * (1.0 - _RETURN**steps)
        offset[r] *= _RETURN**steps
        offset_var[r] = min(_OFFSET_PRIOR, offset_var[r] + steps * _OFFSET_DRIFT)
    for j in range(bias.size):
        bias[j] += given_up


@dataclass(slots=True)
class Verdicts:
    """What the target made of a step's drafts. B requests, N drafted tokens."""

    place: Ints
    """[B] in the model's columns; −1: nothing is to be learnt from this request."""
    drafted: Ints
    """[B]"""
    tested: Ints
    """[B] tokens with a verdict: the accepted ones, and the first rejected one."""
    accepted: Ints
    """[B]"""


class AcceptanceModel:
    """The filter's state for one proposer. Requests have places in its columns, see ``Places``."""

    def __init__(self, weight: float, bias: float, *, weight_variance: float = _WEIGHT_PRIOR) -> None:
        """
        Args:
            weight: of the feature, before anything is known; 0 for a model that has no feature.
            bias: of every position.
            weight_variance: how uncertain the weight is, then and at most.
        """
        variance = weight_variance if weight else 0.0
        self.weight: Floats = np.array([weight, variance, variance])
        """Mean; variance; what that is at most."""
        self.bias: Floats = np.full(POSITIONS, bias)
        self.offset: Floats = np.zeros(0)
        self.bias_var: Floats = np.full(POSITIONS, _BIAS_PRIOR)
        self._offset_var: Floats = np.zeros(0)

    def grow(self, places: int) -> None:
        """Makes room for requests."""
        more = places - self.offset.size
        if more > 0:
            self.offset = np.concatenate([self.offset, np.zeros(more)])
            self._offset_var = np.concatenate([self._offset_var, np.full(more, _OFFSET_PRIOR)])

    def admit(self, place: int, expected: float | None) -> None:
        """A new request takes a place; ``expected`` is the acceptance its caller expects, or None."""
        offset = 0.0 if expected is None else logit(expected) - self.bias[0]
        self.offset[place] = offset
        self._offset_var[place] = _OFFSET_PRIOR

    def retire(self, places: Ints) -> None:
        """Requests have ended: what was learnt of them says something of those to come."""
        self.bias += _TO_ALL * float(self.offset[places].sum())

    def observe(self, seen: Verdicts, feature: Floats) -> None:
        """Learns from verified slots; ``feature`` [N] of all drafted tokens, one request after the other."""
        _filter(
            self.weight,
            self.bias,
            self.bias_var,
            self.offset,
            self._offset_var,
            seen.place,
            seen.drafted,
            seen.tested,
            seen.accepted,
            feature,
        )

    def doubt(self) -> None:
        """What was learnt may hold no longer: the next observations count as the first ones did."""
        self.bias_var = np.maximum(self.bias_var, _BIAS_PRIOR)

    def age(self, steps: int = 1, drafting: int | None = None) -> None:
        """So many steps have passed, of which so many drafted; None: all."""
        drafting = steps if drafting is None else drafting
        _age(self.weight, self.bias, self.bias_var, self.offset, self._offset_var, steps, drafting)

    def chance(self, position: int) -> float:
        """Conditional acceptance at a position for a request like the average, with the feature at 0."""
        return float(1.0 / (1.0 + np.exp(-self.bias[min(position, POSITIONS - 1)])))


class Places:
    """Which place in the models' columns a request has."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._free: list[int] = []
        self._last: tuple[Sequence[str], Ints] = ((), np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self._of) + len(self._free)

    def get(self, ids: Sequence[str]) -> tuple[Ints, list[int]]:
        """Places of ``ids``, and the indices in it of requests that are new."""
        if ids == self._last[0]:
            return self._last[1], []
        of, new = self._of, []
        for index, request in enumerate(ids):
            if request not in of:
                of[request] = self._free.pop() if self._free else len(of)
                new.append(index)
        self._last = ids, np.array([of[request] for request in ids], dtype=np.int64)
        return self._last[1], new

    def find(self, ids: Sequence[str]) -> Ints:
        """Places of ``ids``; −1 for those that have been forgotten."""
        if ids == self._last[0]:
            return self._last[1]
        return np.array([self._of.get(request, -1) for request in ids], dtype=np.int64)

    def forget(self, ids: Sequence[str]) -> Ints:
        """The places that have become free."""
        places = [self._of.pop(request) for request in ids if request in self._of]
        self._free.extend(places)
        self._last = (), np.zeros(0, np.int64)
        return np.array(places, dtype=np.int64)


@njit(cache=True, nogil=True)
def logits(confidence: Floats) -> Floats:
    """log(c / (1 − c)), cut to ±``LOGIT_RANGE``; NaN counts as no confidence."""
    out = np.empty(confidence.size)
    for n in range(confidence.size):
        c = confidence[n]
        c = min(max(c if c == c else 0.0, _LOWEST), 1.0 - _LOWEST)
        out[n] = np.log(c / (1.0 - c))
    return out


def logit(chance: float) -> float:
    """The same of one number."""
    return float(logits(np.array([chance]))[0])


def conditional(rates: Sequence[float]) -> list[float]:
    """Conditional acceptance from unconditional rates per position."""
    before, chances = 1.0, []
    for rate in rates:
        chances.append(rate / before if before > 0.0 else 0.0)
        before = rate
    return chances
