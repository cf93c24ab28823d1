"""How often drafted tokens were accepted, and how well that was known before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynaspec.control.estimate.acceptance import POSITIONS, AcceptanceModel
from dynaspec.control.estimate.settings import AutoSettings

from .data import Flags, Floats, Ints, Verdicts

BINS = 10
_WHOLE_LOG = AutoSettings(memory=1e9, surprise=1e9)
"""Nothing is forgotten."""
_EPOCHS = 2
"""In the last, requests are held against an average that is known by then."""


@dataclass(frozen=True, slots=True)
class ByPosition:
    """[J] Conditional acceptance: of the drafts right up to a position, those right there."""

    tested: Ints
    accepted: Ints


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


def learn_acceptance(tests: Verdicts, requests: int) -> AcceptanceModel:
    """Acceptance by position and request, of all of the log alike; a request's slot is its index.

    Args:
        requests: how many there are.
    """
    first = np.flatnonzero(tests.position == 0)
    length = np.diff(first, append=tests.position.size)
    right = np.add.reduceat(tests.accepted, first, dtype=np.int64) if first.size else first
    model = AcceptanceModel(_WHOLE_LOG, signal=False)
    for _ in range(_EPOCHS):
        for slot in range(requests):
            model.admit(slot)
        model.observe(tests.request[first], length, length, right, np.zeros(tests.position.size))
    return model


def chances(model: AcceptanceModel, requests: Ints, length: int) -> Floats:
    """[n, length] conditional acceptance by position, for each of these requests [n]."""
    biases = model.biases()[np.minimum(np.arange(length), POSITIONS - 1)]
    logit = biases[None, :] + model.offsets(requests)[:, None]
    return np.asarray(1.0 / (1.0 + np.exp(-logit)), dtype=np.float64)


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
