"""Seconds of a model pass as a function of its rows, kept current from measured passes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from dynaspec.contract.costs import Curve

from ..profile import Profile

Floats = npt.NDArray[np.float64]

KNOTS = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096], dtype=np.float64)
"""Rows at which the curve is kept; in between it is a straight line, beyond the last it goes on as before it."""

_HINGES = np.array([0.0, 8.0, 32.0, 128.0, 512.0])
"""Rows from which on a row may cost something else."""
_SCALES = np.array([8.0, 32.0, 128.0, 512.0, 2048.0])
_FORGET = 0.99
_RIDGE = np.array([0.5, 2.0, 2.0, 2.0, 2.0, 2.0])
"""How firmly level and slopes are held at their start: rows never seen keep the slope of start-up."""
_OUTLIER = 1.5
"""A pass this many times longer than expected was disturbed: it counts as that long only."""
_TYPICAL_SLOPE = 0.03
"""Without any measurement: a row costs this share of a pass of one row."""


@njit(cache=True, nogil=True)
def interpolate(knots: Floats, seconds: Floats, rows: float) -> float:
    """The curve at ``rows``."""
    last = knots.size - 2
    i = 0
    while i < last and knots[i + 1] < rows:
        i += 1
    share = (rows - knots[i]) / (knots[i + 1] - knots[i])
    if rows <= knots[0]:
        return float(seconds[0])
    return float(seconds[i] + share * (seconds[i + 1] - seconds[i]))


class CostCurve:
    """Least squares with exponential forgetting over a line with hinges, held at what was measured at start-up.

    Slopes are what decisions rest on, and single passes are noisy: so it is all rows seen lately that settle a slope.
    """

    def __init__(self, start: Curve) -> None:
        """
        Args:
            start: (rows, seconds) with ascending rows; empty = a guess, scaled by the first pass.
        """
        self.known = bool(start)
        rows, seconds = np.array(start).T if start else (KNOTS, 1.0 + _TYPICAL_SLOPE * KNOTS)
        self._start = _coefficients(rows, np.maximum.accumulate(seconds))
        self._moments: Floats = np.zeros((_RIDGE.size, _RIDGE.size))
        self._products: Floats = np.zeros(_RIDGE.size)
        self.seconds = _curve(self._start)

    def at(self, rows: float) -> float:
        """Seconds of a pass."""
        return float(interpolate(KNOTS, self.seconds, rows))

    def observe(self, rows: int, seconds: float) -> None:
        """Takes in one measured pass of ``rows`` ≥ 1; ``settle`` makes it count."""
        if seconds <= 0.0:
            return
        if not self.known:
            self._start = self._start * (seconds / self.at(rows))
            self.seconds = _curve(self._start)
            self.known = True
        features = _features(np.array([float(rows)]))[0]
        seconds = min(seconds, _OUTLIER * self.at(rows))
        self._moments = _FORGET * self._moments + np.outer(features, features)
        self._products = _FORGET * self._products + seconds * features

    def settle(self) -> None:
        """Fits the curve to the passes observed."""
        solution = np.linalg.solve(self._moments + np.diag(_RIDGE), self._products + _RIDGE * self._start)
        self.seconds = _curve(np.asarray(solution, np.float64))

    def document(self) -> list[list[float]]:
        """[rows, seconds] pairs, for the decision log."""
        return [[rows, seconds] for rows, seconds in zip(KNOTS.tolist(), self.seconds.tolist(), strict=True)]


def saved_curve(profile: Profile | None) -> Curve:
    """Plain decoding of a saved profile: a step of b requests has b rows."""
    if profile is None:
        return ()
    return tuple((batch, profile.itl_ms(batch, 0) / 1e3) for batch in sorted(profile.batch_stats))


def _coefficients(rows: Floats, seconds: Floats) -> Floats:
    """The hinged line through some points; beyond them it goes on as it ends."""
    features = _features(rows)
    slope = (seconds[-1] - seconds[0]) / (rows[-1] - rows[0]) if rows.size > 1 else _TYPICAL_SLOPE * seconds[0]
    flat = np.array([seconds[0] - slope * rows[0], slope * _SCALES[0], 0.0, 0.0, 0.0, 0.0])
    tiny = 1e-3 * np.eye(flat.size)
    return np.asarray(np.linalg.solve(features.T @ features + tiny, features.T @ seconds + tiny @ flat), np.float64)


def _curve(coefficients: Floats) -> Floats:
    """Seconds at the knots: more rows never cost less, and nothing is free."""
    fitted = _features(KNOTS) @ coefficients
    return np.maximum.accumulate(np.maximum(fitted, 1e-3 * np.abs(fitted).max()))


def _features(rows: Floats) -> Floats:
    """[n, 6]: 1, and the rows beyond each hinge."""
    beyond = np.maximum(rows[:, None] - _HINGES, 0.0) / _SCALES
    return np.concatenate([np.ones((rows.size, 1)), beyond], axis=1)
