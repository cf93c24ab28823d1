"""What speaks for drafted tokens, as numbers: read off the columns of drafts and outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from .step import LOGIT_RANGE

Floats = npt.NDArray[np.float64]


def logits(confidence: Floats) -> Floats:
    """ln(c / (1 − c)), cut to ±``LOGIT_RANGE``; NaN counts as no confidence."""
    lowest = 1.0 / (1.0 + np.exp(LOGIT_RANGE))
    c = np.fmin(np.fmax(confidence, lowest), 1.0 - lowest)  # of NaN and a number these take the number
    return np.asarray(np.log(c / (1.0 - c)))


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


def flat(rows: Sequence[Sequence[float]], lens: Sequence[int]) -> Floats:
    """[Σ lens] The first entries of each row, one row after the other; 0 where a row is shorter than that."""
    if list(map(len, rows)) == list(lens):
        return np.array(list(chain.from_iterable(rows)), dtype=np.float64)
    found: list[float] = []
    for i, length in enumerate(lens):
        row = rows[i] if i < len(rows) else ()
        found.extend(row[:length] if len(row) >= length else (0.0,) * length)
    return np.array(found, dtype=np.float64)


def signal_of(signal: Sequence[Sequence[float]], confidence: Sequence[Sequence[float]], lens: Sequence[int]) -> Floats:
    """[Σ lens] What speaks for each drafted token, one request after the other: the proposer's signal, or where it has
    none the logit of its confidence; 0 without either.

    Args:
        signal, confidence: as in ``DraftView`` and ``StepOutcome``.
        lens: [B] of the drafts.
    """
    if signal:
        return flat(signal, lens)
    if list(map(len, confidence)) == list(lens):
        return logits(np.array(list(chain.from_iterable(confidence)), dtype=np.float64))
    told = [length if len(row) >= length else 0 for row, length in zip(confidence, lens, strict=True)]
    found = np.zeros(sum(lens))
    found[np.repeat(np.array(told, dtype=np.int64) > 0, lens)] = logits(flat(confidence, told))
    return found
