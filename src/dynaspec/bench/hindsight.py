"""The most that a drafter's signals could give, had one known the texts when the rule was chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dynaspec.contract.signals import logits
from dynaspec.control.estimate.acceptance import AcceptanceModel
from dynaspec.control.estimate.costs import StepCosts
from dynaspec.control.estimate.settings import AutoSettings

from .passes import KnownText, stopped, tokens_per_second, walk
from .rollout import Floats, Ints, Rollouts

Signal = Callable[[Rollouts], Floats]
"""[n, longest] what speaks for each drafted token, on the scale of a logit."""

_GRID = np.round(np.arange(0.0, 1.0, 0.05), 2)
_SURVIVALS = np.round(np.arange(0.02, 0.9, 0.02), 2)
_POSITIONS = 8
"""Positions with a threshold of their own; later ones share the last."""
_SWEEPS = 2
_SETTINGS = AutoSettings(memory=1e9, surprise=1e9, request_shrinkage=1e9)
"""Nothing is forgotten, and texts do not differ."""
_EPOCHS = 6


@dataclass(frozen=True, slots=True)
class Hindsight:
    """A rule, and what it gives on the texts that it was chosen on."""

    tokens_per_second: float
    thresholds: tuple[float, ...]
    lengths: tuple[Ints, ...]
    """For each text, the draft length at each position."""


def best_threshold(texts: Sequence[KnownText], costs: StepCosts) -> Hindsight:
    """One confidence threshold for all positions."""
    return max((_by_confidence(texts, costs, (float(t),)) for t in _GRID), key=lambda h: h.tokens_per_second)


def best_threshold_per_position(texts: Sequence[KnownText], costs: StepCosts) -> Hindsight:
    """A confidence threshold for every position, improved in turn from the best common one."""
    start = best_threshold(texts, costs)
    best = _by_confidence(texts, costs, start.thresholds * _POSITIONS)
    for _ in range(_SWEEPS):
        for position in range(_POSITIONS):
            for threshold in _GRID:
                tried = list(best.thresholds)
                tried[position] = float(threshold)
                found = _by_confidence(texts, costs, tuple(tried))
                best = max(best, found, key=lambda h: h.tokens_per_second)
    return best


def signal(rollouts: Rollouts) -> Floats:
    """All that the proposer knows of a token: how far its first choice is ahead, and what the text said before."""
    return rollouts.signal


def confidence_alone(rollouts: Rollouts) -> Floats:
    """logit(confidence), cut to ±``LOGIT_RANGE``: what a proposer tells that has no other signal."""
    return logits(rollouts.confidence)


def best_survival(texts: Sequence[KnownText], costs: StepCosts, signal: Signal) -> Hindsight:
    """Stops where the chance that the whole draft is right falls below a threshold.

    The chance is what an ``AcceptanceModel`` says that was taught with these very texts.
    """
    chances = survivals(texts, signal)
    found = []
    for threshold in _SURVIVALS:
        lengths = tuple(stopped(chance, threshold) for chance in chances)
        found.append(Hindsight(_speed(texts, lengths, costs), (float(threshold),), lengths))
    return max(found, key=lambda h: h.tokens_per_second)


def fit_acceptance(texts: Sequence[KnownText], signal: Signal) -> AcceptanceModel:
    """Acceptance by position and signal, taught with all drafts, several times over.

    A draft begins at every place of a text. Its right tokens are tested, and the first wrong one.
    """
    told = [signal(text.rollouts) for text in texts]
    runs = np.concatenate([text.rollouts.runs for text in texts])
    longest = np.concatenate([np.full(each.shape[0], each.shape[1]) for each in told])
    # Nothing is expected of a signal before.
    model = AcceptanceModel(_SETTINGS, weights=(1.0, 0.0, 0.0), variances=(1.0, 1.0, 1.0))
    model.admit(0)
    flat = np.concatenate([each.ravel() for each in told])
    for _ in range(_EPOCHS):
        model.observe(np.zeros_like(runs), longest, np.minimum(runs + 1, longest), np.minimum(runs, longest), flat)
    return model


def survivals(texts: Sequence[KnownText], signal: Signal) -> list[Floats]:
    """For each text, the chance that a draft is right up to each token [n, longest], after ``fit_acceptance``."""
    model, found = fit_acceptance(texts, signal), []
    for text in texts:
        told = signal(text.rollouts)
        slots, lens = np.zeros(len(told), dtype=np.int64), np.full(len(told), told.shape[1])
        found.append(model.survival(slots, lens, told.shape[1], told.ravel()))
    return found


def _by_confidence(texts: Sequence[KnownText], costs: StepCosts, thresholds: tuple[float, ...]) -> Hindsight:
    lengths = []
    for text in texts:
        confidence = text.rollouts.confidence
        below = np.array(thresholds)[np.minimum(np.arange(confidence.shape[1]), len(thresholds) - 1)]
        lengths.append(stopped(confidence, below))
    return Hindsight(_speed(texts, lengths, costs), thresholds, tuple(lengths))


def _speed(texts: Sequence[KnownText], lengths: Sequence[Ints], costs: StepCosts) -> float:
    walks = [walk(text, rule) for text, rule in zip(texts, lengths, strict=True)]
    return tokens_per_second(walks, costs)
