"""How often drafted tokens were accepted, and how well that was known before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .data import Flags, Floats, Ints, Verdicts

PRIOR = 2.0
"""Verdicts that the overall rate counts for at every position, so that a rare position is not 0 or 1 by chance."""
BINS = 10


@dataclass(frozen=True, slots=True)
class ByPosition:
    """[J] Conditional acceptance: of the drafts right up to a position, those right there."""

    tested: Ints
    accepted: Ints

    @property
    def overall(self) -> float:
        return float(self.accepted.sum() / self.tested.sum()) if self.tested.sum() else 0.0

    def smoothed(self, length: int) -> Floats:
        """[length] rates, drawn a little towards the overall one; behind the last position tested, that one's."""
        rates = (self.accepted + PRIOR * self.overall) / (self.tested + PRIOR)
        last = rates[-1] if rates.size else 0.0
        return np.concatenate([rates, np.full(max(0, length - rates.size), last)])[:length]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predictions in bins, against what happened; bins without any are left out."""

    predicted: Floats
    """[b] mean prediction."""
    observed: Floats
    """[b] share accepted."""
    count: Ints
    """[b]"""
    auc: float | None
    """Chance that an accepted token had the higher prediction than a rejected one; None without both kinds."""
    error: float
    """Mean |predicted − observed| over tokens."""


def by_position(tests: Verdicts) -> ByPosition:
    size = int(tests.position.max(initial=-1)) + 1
    return ByPosition(
        tested=np.bincount(tests.position, minlength=size),
        accepted=np.bincount(tests.position[tests.accepted], minlength=size),
    )


def calibrate(predicted: Floats, accepted: Flags) -> Calibration | None:
    """Bins of equal width over 0 … 1; None where there is no finite prediction."""
    finite = np.isfinite(predicted)
    predicted, accepted = predicted[finite], accepted[finite]
    if not predicted.size:
        return None
    bins = np.clip((predicted * BINS).astype(np.int64), 0, BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    some = count > 0
    mean = np.bincount(bins, weights=predicted, minlength=BINS)[some] / count[some]
    share = np.bincount(bins, weights=accepted, minlength=BINS)[some] / count[some]
    error = float(np.abs(mean - share) @ count[some] / count.sum())
    return Calibration(mean, share, count[some], area_under_curve(predicted, accepted), error)


def area_under_curve(predicted: Floats, accepted: Flags) -> float | None:
    """The ROC curve's, by ranks; ties count half."""
    hits = int(accepted.sum())
    misses = accepted.size - hits
    if not hits or not misses:
        return None
    ordered = np.sort(predicted)
    first = np.searchsorted(ordered, predicted, side="left")
    last = np.searchsorted(ordered, predicted, side="right")
    ranks = (first + last + 1) / 2
    return float((ranks[accepted].sum() - hits * (hits + 1) / 2) / (hits * misses))
