"""Seconds that drafting takes, by passes and rows."""

from __future__ import annotations

import numpy as np

from dynaspec.contract.costs import Curve
from dynaspec.contract.step import Work

_FORGET = 0.98
_RIDGE = np.array([1.0, 1.0, 16.0, 16.0])
"""How firmly call, pass, row and rows caught up are held at their start: what steps of one kind cannot tell apart
stays there."""
_WEAK = 0.05
"""The same for a start that is a guess from one step."""
_OUTLIER = 1.5
_SETTLED = 8
_SOLVE_EVERY = 8


_CHUNK = 16.0
"""Rows caught up are counted in chunks, so that all features are of about one size."""


class DraftCost:
    """seconds ≈ call + pass · passes + row · rows + caught up · what the first pass ingests on top.

    By least squares with exponential forgetting. A row that drafts costs more than one that is only ingested: a token
    is drawn from it.
    """

    def __init__(self, start: Curve, model: bool) -> None:
        """
        Args:
            start: measured passes of the drafter; empty = unknown until it has drafted.
            model: whether drafting runs a model at all; a look-up has no passes.
        """
        self._start = np.zeros(_RIDGE.size)
        self.known = bool(start) or not model
        if start:
            (low, low_s), (high, high_s) = start[0], start[-1]
            row = max(0.0, (high_s - low_s) / (high - low)) if high > low else 0.0
            self._start = np.array([0.0, max(low_s - row * low, 0.1 * low_s), row, _CHUNK * row])
        self._ridge = _RIDGE
        self._solution = self._start
        self._moments = np.zeros((_RIDGE.size, _RIDGE.size))
        self._products = np.zeros(_RIDGE.size)
        self._steps = 0

    @property
    def call(self) -> float:
        return float(self._solution[0])

    @property
    def per_pass(self) -> float:
        return float(self._solution[1])

    @property
    def per_row(self) -> float:
        return float(self._solution[2])

    @property
    def per_row_caught_up(self) -> float:
        return float(self._solution[3]) / _CHUNK

    def suppose(self, target_pass: float) -> None:
        """Until it has drafted: a drafter's pass takes a tenth of the target's."""
        if not self.known:
            self._solution = np.array([0.0, 0.1, 0.002, 0.002 * _CHUNK]) * target_pass

    def observe(self, work: Work, drafting: int, seconds: float) -> None:
        """Takes in a step in which so many requests drafted."""
        passes = len(work.rows_per_pass)
        caught_up = max(0, work.rows_per_pass[0] - drafting) if passes else 0
        features = np.array([1.0, passes, sum(work.rows_per_pass) - caught_up, caught_up / _CHUNK])
        if not self.known:
            self._start = np.array([0.0, seconds / max(1, passes), 0.0, 0.0])
            self._ridge = _WEAK * _RIDGE
            self.known = True
        if self._steps > _SETTLED:
            seconds = min(seconds, _OUTLIER * float(features @ self._solution))
        self._moments = _FORGET * self._moments + np.outer(features, features)
        self._products = _FORGET * self._products + seconds * features
        self._steps += 1
        if self._steps < _SETTLED or self._steps % _SOLVE_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        """Least squares with all coefficients ≥ 0: a negative one is left out, and the rest solved again."""
        free = np.ones(_RIDGE.size, dtype=np.bool_)
        solution = np.zeros(_RIDGE.size)
        for _ in range(_RIDGE.size):
            at = np.flatnonzero(free)
            part = np.linalg.solve(
                (self._moments + np.diag(self._ridge))[np.ix_(at, at)], (self._products + self._ridge * self._start)[at]
            )
            if (part >= 0.0).all():
                solution[at] = part
                break
            free[at[int(part.argmin())]] = False
        self._solution = solution
