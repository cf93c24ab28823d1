"""Seconds that drafting takes, by passes and rows."""

from __future__ import annotations

import numpy as np

from dynaspec.contract.costs import Curve
from dynaspec.contract.step import Work

_FORGET = 0.98
_RIDGE = np.array([1.0, 1.0, 16.0])
"""How firmly call, pass and row are held at their start: what steps of one kind cannot tell apart stays there."""
_WEAK = 0.05
"""The same for a start that is a guess from one step."""
_OUTLIER = 1.5
_SETTLED = 8
_SOLVE_EVERY = 8


class DraftCost:
    """seconds ≈ call + pass · passes + row · rows, by least squares with exponential forgetting.

    The first pass of a step ingests what the drafter lacks, so its rows are part of ``rows`` like all others.
    """

    def __init__(self, start: Curve, model: bool) -> None:
        """
        Args:
            start: measured passes of the drafter; empty = unknown until it has drafted.
            model: whether drafting runs a model at all; a look-up has no passes.
        """
        self._start = np.zeros(3)
        self.known = bool(start) or not model
        if start:
            (low, low_s), (high, high_s) = start[0], start[-1]
            row = max(0.0, (high_s - low_s) / (high - low)) if high > low else 0.0
            self._start = np.array([0.0, max(low_s - row * low, 0.1 * low_s), row])
        self._ridge = _RIDGE
        self._solution = self._start
        self._moments = np.zeros((3, 3))
        self._products = np.zeros(3)
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

    def suppose(self, target_pass: float) -> None:
        """Until it has drafted: a drafter's pass takes a tenth of the target's."""
        if not self.known:
            self._solution = np.array([0.0, 0.1 * target_pass, 0.002 * target_pass])

    def observe(self, work: Work, seconds: float) -> None:
        """Takes in a step that drafted."""
        rows = sum(work.rows_per_pass)
        features = np.array([1.0, float(len(work.rows_per_pass)), float(rows)])
        if not self.known:
            self._start = np.array([0.0, seconds / max(1, len(work.rows_per_pass)), 0.0])
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
        free = np.ones(3, dtype=np.bool_)
        solution = np.zeros(3)
        for _ in range(3):
            at = np.flatnonzero(free)
            part = np.linalg.solve(
                (self._moments + np.diag(self._ridge))[np.ix_(at, at)], (self._products + self._ridge * self._start)[at]
            )
            if (part >= 0.0).all():
                solution[at] = part
                break
            free[at[int(part.argmin())]] = False
        self._solution = solution
