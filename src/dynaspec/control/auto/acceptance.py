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
_WEIGHT_PRIOR, _BIAS_PRIOR, _OFFSET_PRIOR = 0.25, 1.0, 0.5
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
    feature: Floats,
    position: Ints,
    place: Ints,
    accepted: Floats,
) -> None:
    """One observation after the other; ``weight`` is [mean, variance]."""
    for n in range(feature.size):
        j, r, x = min(position[n], bias.size - 1), place[n], feature[n]
        p = _sigmoid(weight[0] * x + bias[j] + offset[r])
        slope = max(p * (1.0 - p), 0.01)
        gain = 1.0 / (1.0 + slope * (x * x * weight[1] + bias_var[j] + offset_var[r]))
        error = accepted[n] - p
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


@njit(cache=True, nogil=True)
def _age(weight: Floats, bias_var: Floats, offset: Floats, offset_var: Floats, steps: int) -> None:
    weight[1] = min(_WEIGHT_PRIOR, weight[1] + steps * _WEIGHT_DRIFT)
    for j in range(bias_var.size):
        bias_var[j] = min(_BIAS_PRIOR, bias_var[j] + steps * _BIAS_DRIFT)
    for r in range(offset.size):
        offset[r] *= _RETURN**steps
        offset_var[r] = min(_OFFSET_PRIOR, offset_var[r] + steps * _OFFSET_DRIFT)


@dataclass(slots=True)
class Observations:
    """Verified slots of a step, N in all."""

    feature: Floats
    """[N]"""
    position: Ints
    """[N] from 0."""
    place: Ints
    """[N] the request's place in the model's columns."""
    accepted: Floats
    """[N] 1 or 0."""


class AcceptanceModel:
    """The filter's state for one proposer. Requests have places in its columns, see ``Places``."""

    def __init__(self, weight: float, bias: float) -> None:
        """
        Args:
            weight: of the feature, before anything is known; 0 for a model that has no feature.
            bias: of every position.
        """
        self.weight: Floats = np.array([weight, _WEIGHT_PRIOR if weight else 0.0])
        self.bias: Floats = np.full(POSITIONS, bias)
        self.offset: Floats = np.zeros(0)
        self._bias_var: Floats = np.full(POSITIONS, _BIAS_PRIOR)
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

    def observe(self, seen: Observations) -> None:
        """Learns from verified slots, in their order."""
        _filter(
            self.weight,
            self.bias,
            self._bias_var,
            self.offset,
            self._offset_var,
            seen.feature,
            seen.position,
            seen.place,
            seen.accepted,
        )

    def age(self, steps: int = 1) -> None:
        """So many steps have passed."""
        _age(self.weight, self._bias_var, self.offset, self._offset_var, steps)

    def hopeful(self, deviations: float) -> Floats:
        """[POSITIONS] the biases if they are so many standard deviations better than estimated."""
        return np.asarray(self.bias + deviations * np.sqrt(self._bias_var))

    def chance(self, position: int) -> float:
        """Conditional acceptance at a position for a request like the average, with the feature at 0."""
        return float(1.0 / (1.0 + np.exp(-self.bias[min(position, POSITIONS - 1)])))


class Places:
    """Which place in the models' columns a request has."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._of) + len(self._free)

    def get(self, ids: Sequence[str]) -> tuple[Ints, list[int]]:
        """Places of ``ids``, and the indices in it of requests that are new."""
        of, new = self._of, []
        for index, request in enumerate(ids):
            if request not in of:
                of[request] = self._free.pop() if self._free else len(of)
                new.append(index)
        return np.array([of[request] for request in ids], dtype=np.int64), new

    def find(self, request: str) -> int | None:
        """A request's place, or None if it has been forgotten."""
        return self._of.get(request)

    def forget(self, ids: Sequence[str]) -> None:
        for request in ids:
            place = self._of.pop(request, None)
            if place is not None:
                self._free.append(place)


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
