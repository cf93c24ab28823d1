"""The parts that a step's seconds are a sum of, and what start-up knows of them.

The target's pass has a fixed part, a price a row that changes with the rows there are, and two prices for context: the
KV of a request is read once for all its rows, and each row is computed with it. A draft has a price for its start, a
pass, a row and a row that is only ingested.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
from numba import njit

from dynaspec.contract.costs import Curve, PassCosts

Floats = npt.NDArray[np.float64]

BOUNDS = np.array([0.0, 4.0, 8.0, 14.0, 16.0, 28.0, 32.0, 128.0, 512.0])
"""Rows of a target pass from which on a row may cost something else: where a pass no longer waits for memory, and
around the sizes at which the CPU's products take one tile more (14 rows and 28)."""
PASS_PARTS = 3 + BOUNDS.size
"""Parts of a target pass: fixed, a row in each range, a KV entry read for a request, a KV entry seen by a row."""
DRAFT_PARTS = 5
"""Parts of drafting: start, pass, row, row ingested on top, and what the target's pass takes more after it."""

_TYPICAL_ROW = 0.03
"""Without any measurement: a row costs this share of a pass of one row, …"""
_TYPICAL_DRAFT = (0.02, 0.1, 0.002, 0.002)
"""… and drafting these shares of it."""
_RELOAD = 0.1
"""Scale, as a share of the target's fixed part, of what its pass takes more where a drafter has used the caches."""
_LEAST_ROW = 5e-4
"""A row is never free, but costs this share of a pass of one row at least."""
_TYPICAL_READ, _TYPICAL_SEEN = 1e-5, 1e-6
"""A KV entry that is read for a request, and one that a row sees, of the fixed part: memory is what it takes."""
_INGESTED = 0.7
"""A row only ingested, of one that is drawn from as well."""


@njit(cache=True, nogil=True)
def pass_s(parts: Floats, rows: float, context: float, read: float) -> float:
    """Seconds of a target pass.

    Args:
        parts: [12] seconds, see ``StepCosts.target``.
        context: Σ over the rows of the KV entries they see.
        read: Σ over the requests of their KV entries.
    """
    seconds = parts[0] + parts[parts.size - 1] * context + parts[parts.size - 2] * read
    for i in range(BOUNDS.size):
        if rows <= BOUNDS[i]:
            break
        top = BOUNDS[i + 1] if i + 1 < BOUNDS.size else rows
        seconds += parts[1 + i] * (min(rows, top) - BOUNDS[i])
    return float(seconds)


@njit(cache=True, nogil=True)
def row_s(parts: Floats, rows: float) -> float:
    """Seconds of one more row in a target pass of so many, its context apart."""
    i = BOUNDS.size - 1
    while i > 0 and rows < BOUNDS[i]:
        i -= 1
    return float(parts[1 + i])


@njit(cache=True, nogil=True)
def rows_s(parts: Floats, low: float, high: float) -> float:
    """Seconds that a target pass of ``high`` rows takes more than one of ``low``, their context apart."""
    seconds = 0.0
    for i in range(BOUNDS.size):
        top = BOUNDS[i + 1] if i + 1 < BOUNDS.size else high
        seconds += parts[1 + i] * max(0.0, min(high, top) - max(low, BOUNDS[i]))
    return float(seconds)


@njit(cache=True, nogil=True)
def row_on_the_way_s(parts: Floats, rows: float, most: float) -> float:
    """Seconds of the next row where up to ``most`` rows may come: the least average price on the way there, as a tile
    that is begun is paid for by all that fill it."""
    least = rows_s(parts, rows, most) / (most - rows)
    for i in range(BOUNDS.size):
        if rows < BOUNDS[i] < most:
            least = min(least, rows_s(parts, rows, BOUNDS[i]) / (BOUNDS[i] - rows))
    return float(least)


@njit(cache=True, nogil=True)
def pass_features(size: int, rows: float, context: float, read: float) -> Floats:
    """[size] what ``pass_s`` multiplies each part by, the target's parts first."""
    features = np.zeros(size)
    features[0] = 1.0
    features[PASS_PARTS - 2], features[PASS_PARTS - 1] = read, context
    for i in range(BOUNDS.size):
        top = BOUNDS[i + 1] if i + 1 < BOUNDS.size else np.inf
        features[1 + i] = max(0.0, min(rows, top) - BOUNDS[i])
    return features


def target_start(measured: PassCosts) -> tuple[Floats, bool]:
    """The parts of a target pass by a measured curve, and whether there was one."""
    curve = measured.target or ((1, 1.0 + _TYPICAL_ROW), (2, 1.0 + 2 * _TYPICAL_ROW))
    least = _LEAST_ROW * curve[0][1]
    slopes = []
    for low, high in pairwise((*BOUNDS.tolist(), 2 * BOUNDS[-1])):
        slopes.append(max(least, (_along(curve, high) - _along(curve, max(1.0, low))) / (high - max(1.0, low))))
    fixed = max(0.1 * curve[0][1], curve[0][1] - slopes[0] * curve[0][0])
    read = measured.read_s or _TYPICAL_READ * fixed
    return np.array([fixed, *slopes, read, measured.context_s or _TYPICAL_SEEN * fixed]), bool(measured.target)


def draft_start(measured: PassCosts, proposer: int, target_s: float, runs_model: bool) -> tuple[Floats, bool]:
    """The parts of drafting, and whether they were measured."""
    curve = measured.drafters[proposer] if proposer < len(measured.drafters) else ()
    if not runs_model:
        return np.array([1e-3, 0.0, 0.0, 0.0, 0.0]) * target_s, False
    if not curve:
        return np.array((*_TYPICAL_DRAFT, _RELOAD)) * target_s, False
    (low, low_s), (high, high_s) = curve[0], curve[-1]
    row = (high_s - low_s) / (high - low) if high > low else 0.0
    row = max(_LEAST_ROW * low_s, row)
    first = measured.first_s[proposer] if proposer < len(measured.first_s) else 0.0
    one = max(0.1 * low_s, low_s - row * low)
    return np.array([max(first, 1e-2 * one), one, row, _INGESTED * row, _RELOAD * target_s]), True


def _along(curve: Curve, rows: float) -> float:
    """A curve made non-decreasing; beyond its last two points it goes on as between them."""
    at, seconds = np.array(curve, dtype=np.float64).T
    seconds = np.maximum.accumulate(seconds)
    if rows <= at[-1] or at.size == 1:
        return float(np.interp(rows, at, seconds))
    return float(seconds[-1] + (rows - at[-1]) * (seconds[-1] - seconds[-2]) / (at[-1] - at[-2]))
