"""The most that a drafter's signals could give, had one known the texts when the rule was chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dynaspec.contract.step import LOGIT_RANGE

from .passes import KnownText, StepCosts, stopped, tokens_per_second, walk
from .rollout import Floats, Ints, Rollouts

Signal = Callable[[Rollouts], Floats]
"""[n, longest] what speaks for each drafted token, on the scale of a logit."""

_GRID = np.round(np.arange(0.0, 1.0, 0.05), 2)
_SURVIVALS = np.round(np.arange(0.02, 0.9, 0.02), 2)
_POSITIONS = 8
"""Positions with a threshold, or an intercept, of their own; later ones share the last."""
_SWEEPS = 2
_NEWTON_STEPS = 12
_RIDGE = 1e-2


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


def evidence(rollouts: Rollouts) -> Floats:
    """All that the proposer knows of a token: how far its first choice is ahead, and what the text said before."""
    return rollouts.evidence


def confidence_alone(rollouts: Rollouts) -> Floats:
    """logit(confidence), cut to ±``LOGIT_RANGE``: what a proposer tells that has no other evidence."""
    odds = np.clip(rollouts.confidence, 1e-12, 1 - 1e-12)
    return np.clip(np.log(odds / (1.0 - odds)), -LOGIT_RANGE, LOGIT_RANGE)


def best_survival(texts: Sequence[KnownText], costs: StepCosts, signal: Signal) -> Hindsight:
    """Stops where the chance that the whole draft is right falls below a threshold.

    The chance is a product over the draft of σ(w · signal + bias of the position), w and biases fitted to these very
    texts.
    """
    weights = fit_acceptance(texts, signal)
    chances = [_survival(signal(text.rollouts), weights) for text in texts]
    found = []
    for threshold in _SURVIVALS:
        lengths = tuple(stopped(chance, threshold) for chance in chances)
        found.append(Hindsight(_speed(texts, lengths, costs), (float(threshold),), lengths))
    return max(found, key=lambda h: h.tokens_per_second)


def fit_acceptance(texts: Sequence[KnownText], signal: Signal) -> Floats:
    """[1 + positions] logistic weights: of the signal, then a bias a position. Newton's method with a ridge.

    Observations are the drafted tokens that a target would have tested: the right ones and the first wrong one.
    """
    rows, right = [], []
    for text in texts:
        runs, told = text.rollouts.runs, signal(text.rollouts)
        tested = np.arange(told.shape[1]) <= runs[:, None]
        i, j = np.nonzero(tested)
        rows.append(_features(told[i, j], j))
        right.append(j < runs[i])
    x, y = np.concatenate(rows), np.concatenate(right).astype(np.float64)
    weights: Floats = np.zeros(x.shape[1])
    for _ in range(_NEWTON_STEPS):
        p = 1.0 / (1.0 + np.exp(-x @ weights))
        curvature = (x * (p * (1.0 - p))[:, None]).T @ x + _RIDGE * np.eye(x.shape[1])
        weights = weights + np.asarray(np.linalg.solve(curvature, x.T @ (y - p) - _RIDGE * weights), np.float64)
    return weights


def _features(told: Floats, position: Ints) -> Floats:
    own = np.eye(_POSITIONS)[np.minimum(position, _POSITIONS - 1)]
    return np.column_stack([told, own])


def _survival(told: Floats, weights: Floats) -> Floats:
    """[n, longest] chance that a draft is right up to each token."""
    positions = np.broadcast_to(np.arange(told.shape[1]), told.shape)
    score = _features(told.ravel(), positions.ravel()) @ weights
    accepted = (1.0 / (1.0 + np.exp(-score))).reshape(told.shape)
    return np.asarray(np.cumprod(accepted, axis=1), np.float64)


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
