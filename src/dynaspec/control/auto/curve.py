"""Seconds of a model pass as a function of its rows, kept current from measured passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dynaspec.contract.costs import Curve

Floats = npt.NDArray[np.float64]

KNOTS = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096], dtype=np.float64)
"""Rows at which the curve is kept; in between it is a straight line, beyond the last it goes on as before it."""

_OUTLIER = 1.5
"""A pass this many times longer than expected was disturbed: it counts as that long only."""
_LOCAL = 0.15
_GLOBAL = 0.02
"""Shares of an error by which the knots around it move, and all others: the same disturbance often slows all passes."""
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


@njit(cache=True, nogil=True)
def _learn(knots: Floats, seconds: Floats, rows: float, measured: float) -> None:
    expected = interpolate(knots, seconds, rows)
    error = min(measured, _OUTLIER * expected) - expected
    seconds *= 1.0 + _GLOBAL * error / expected
    last = knots.size - 2
    i = 0
    while i < last and knots[i + 1] < rows:
        i += 1
    share = min(1.0, max(0.0, (rows - knots[i]) / (knots[i + 1] - knots[i])))
    norm = (1 - share) ** 2 + share**2
    seconds[i] += _LOCAL * error * (1 - share) / norm
    seconds[i + 1] += _LOCAL * error * share / norm
    # More rows never cost less: what has been measured here pushes its neighbours along.
    for above in range(i + 1, knots.size):
        seconds[above] = max(seconds[above], seconds[above - 1])
    for below in range(i - 1, -1, -1):
        seconds[below] = min(seconds[below], seconds[below + 1])


class CostCurve:
    """An online estimate that begins with measurements from start-up, or with a guess that the first pass corrects."""

    def __init__(self, start: Curve) -> None:
        """
        Args:
            start: (rows, seconds) with ascending rows; may be empty.
        """
        self.known = bool(start)
        self.seconds: Floats = _spread(start) if start else 1.0 + _TYPICAL_SLOPE * KNOTS

    def at(self, rows: float) -> float:
        """Seconds of a pass."""
        return float(interpolate(KNOTS, self.seconds, rows))

    def observe(self, rows: int, seconds: float) -> None:
        """Takes in one measured pass of ``rows`` ≥ 1."""
        if seconds <= 0.0:
            return
        if not self.known:
            self.seconds *= seconds / self.at(rows)
            self.known = True
        _learn(KNOTS, self.seconds, float(rows), seconds)

    def document(self) -> list[list[float]]:
        """[rows, seconds] pairs, for the decision log."""
        return [[rows, seconds] for rows, seconds in zip(KNOTS.tolist(), self.seconds.tolist(), strict=True)]


def _spread(start: Curve) -> Floats:
    rows, seconds = np.array(start, dtype=np.float64).T
    seconds = np.maximum.accumulate(seconds)
    spread: Any = np.interp(KNOTS, rows, seconds)
    if rows.size > 1:
        slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
        spread = np.where(rows[-1] < KNOTS, seconds[-1] + slope * (KNOTS - rows[-1]), spread)
    else:
        spread = seconds[0] * (1.0 + _TYPICAL_SLOPE * KNOTS) / (1.0 + _TYPICAL_SLOPE * rows[0])
    return np.asarray(spread, dtype=np.float64)
