"""What a step takes, kept current from measured steps.

A step's seconds are a sum of parts: the target's pass has a fixed part, a price a row that changes with the rows there
are, and a price for each KV entry a row sees; a draft has a price for its start, a pass, a row and a row that is only
ingested. Start-up gives each part a value. What is learnt are multipliers of these, by a Kalman filter: one, the pace,
common to all parts, which moves fast, as machines slow down and speed up as a whole; and one a part, slow. So a slow
minute of plain decoding does not make drafting look cheap, and one step of the other kind now and then is enough to
keep the two comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from numba import njit

from dynaspec.contract.costs import Curve, PassCosts

Floats = npt.NDArray[np.float64]

BOUNDS = np.array([0.0, 4.0, 8.0, 14.0, 16.0, 28.0, 32.0, 128.0, 512.0])
"""Rows of a target pass from which on a row may cost something else: where a pass no longer waits for memory, and
around the sizes at which the CPU's products take one tile more (14 rows and 28)."""
_PASS_PARTS = 2 + BOUNDS.size
"""Parts of a target pass: fixed, one for each range of rows, context."""
_DRAFT_PARTS = 5
"""Parts of drafting: start, pass, row, row ingested on top, and what the target's pass takes more after it."""

_TYPICAL_ROW = 0.03
"""Without any measurement: a row costs this share of a pass of one row, …"""
_TYPICAL_DRAFT = (0.02, 0.1, 0.002, 0.002)
"""… and drafting these shares of it."""
_RELOAD = 0.1
"""Scale, as a share of the target's fixed part, of what its pass takes more where a drafter has used the caches."""
_LEAST_ROW = 5e-4
"""A row is never free, but costs this share of a pass of one row at least."""
_INGESTED = 0.7
"""A row only ingested, of one that is drawn from as well."""

_PACE_PRIOR, _UNKNOWN_PRIOR = 0.01, 1.0
"""Variances of multipliers at the start: of the pace, as start-up was just now; of parts that it has not measured."""
_TARGET_PRIOR = (0.06, *(0.03 for _ in BOUNDS), 0.25)
_DRAFT_PRIOR = (1.0, 0.25, 0.04, 0.1, 1.0)
"""Of the parts. Sampling and bookkeeping come on top of what start-up has measured of passes, but not of rows."""
_PACE_MOST = 0.1
"""Variance that the pace reaches at most, while nothing is measured."""
_PACE_DRIFT = 2e-4
"""Variance that a step adds to the pace."""
_PART_RETURN = 0.9998
"""By which the parts' own multipliers go back to what start-up has measured, a step."""
_WHOLE_RETURN = 0.999
"""The same where only whole steps are measured: what a few odd ones have charged to the wrong part must not stay."""
_NEW_IN_A_ROW = 3
"""Whole steps of a number of rows that has not been seen before are left out, as kernels may be made for it, but no
more than so many on end: where hardly any number occurs twice, they have to do."""
_NOISE = 0.12
"""Standard deviation of a measured time, as a share of what was expected."""
_OUTLIER = 0.5
"""A pass that takes longer by more than this share was disturbed: it counts as that much longer only."""
_LEAST = 0.05
"""Of a part's start-up value."""


@njit(cache=True, nogil=True)
def pass_s(parts: Floats, rows: float, context: float) -> float:
    """Seconds of a target pass.

    Args:
        parts: [11] seconds, see ``StepCosts.target``.
        context: Σ over the rows of the KV entries they see.
    """
    seconds = parts[0] + parts[parts.size - 1] * context
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
def _correct(
    start: Floats, paced: Floats, state: Floats, covariance: Floats, parts: Floats, features: Floats, seconds: float
) -> None:
    """Takes in one measured time: features · parts was expected."""
    scale = expected = common = 0.0
    for i in range(features.size):
        scale += features[i] * start[i]
        common += features[i] * start[i] * paced[i]
        expected += features[i] * parts[i]
    if scale <= 0.0 or expected <= 0.0:
        return
    share = np.zeros(state.size)
    share[0] = common / scale
    for i in range(features.size):
        share[1 + i] = features[i] * start[i] / scale
    gain = covariance @ share
    variance = share @ gain + (_NOISE * expected / scale) ** 2
    error = min(seconds, (1.0 + _OUTLIER) * expected) - expected
    for i in range(state.size):
        state[i] += gain[i] / variance * error / scale
        for j in range(state.size):
            covariance[i, j] -= gain[i] * gain[j] / variance
    for i in range(parts.size):
        parts[i] = start[i] * max(_LEAST * paced[i], paced[i] * state[0] + state[1 + i])


@njit(cache=True, nogil=True)
def _age(state: Floats, covariance: Floats, prior: Floats, part_return: float) -> None:
    for i in range(state.size):
        own = 1.0 if i == 0 else part_return
        state[i] *= own
        for j in range(state.size):
            covariance[i, j] *= own * (1.0 if j == 0 else part_return)
        covariance[i, i] += _PACE_DRIFT if i == 0 else (1.0 - part_return * part_return) * prior[i]
    covariance[0, 0] = min(covariance[0, 0], _PACE_MOST)


@njit(cache=True, nogil=True)
def _pass_features(size: int, rows: float, context: float) -> Floats:
    features = np.zeros(size)
    features[0] = 1.0
    features[_PASS_PARTS - 1] = context
    for i in range(BOUNDS.size):
        top = BOUNDS[i + 1] if i + 1 < BOUNDS.size else np.inf
        features[1 + i] = max(0.0, min(rows, top) - BOUNDS[i])
    return features


@njit(cache=True, nogil=True)
def _observe(
    start: Floats,
    paced: Floats,
    state: Floats,
    covariance: Floats,
    prior: Floats,
    parts: Floats,
    rows: float,
    context: float,
    pass_seconds: float,
    at: int,
    passes: float,
    drawn: float,
    ingested: float,
    draft_seconds: float,
) -> None:
    """One step: its target pass, and its drafting with the proposer whose parts begin ``at``; 0 seconds = neither."""
    _age(state, covariance, prior, _PART_RETURN)
    if pass_seconds > 0.0 and rows >= 1.0:
        features = _pass_features(parts.size, rows, context)
        if draft_seconds > 0.0:
            features[at + 4] = 1.0
        _correct(start, paced, state, covariance, parts, features, pass_seconds)
    if draft_seconds > 0.0:
        features = np.zeros(parts.size)
        features[at], features[at + 1], features[at + 2], features[at + 3] = 1.0, passes, drawn, ingested
        _correct(start, paced, state, covariance, parts, features, draft_seconds)


@njit(cache=True, nogil=True)
def _observe_whole(
    start: Floats,
    paced: Floats,
    state: Floats,
    covariance: Floats,
    prior: Floats,
    parts: Floats,
    rows: float,
    context: float,
    at: int,
    passes: float,
    drawn: float,
    seconds: float,
) -> None:
    """One step whose seconds are those of its target pass and of its drafting together; 0 passes = no drafting."""
    _age(state, covariance, prior, _WHOLE_RETURN)
    features = _pass_features(parts.size, rows, context)
    if passes > 0.0:
        features[at], features[at + 1], features[at + 2] = 1.0, passes, drawn
    _correct(start, paced, state, covariance, parts, features, seconds)


@dataclass(slots=True)
class Drafting:
    """What a step did to draft, with one proposer alone."""

    proposer: int
    passes: int
    drawn: int
    """Rows that a token was drawn from, in all passes together."""
    ingested: int
    """Rows on top of them in the first pass."""
    seconds: float


class StepCosts:
    """The parts of a step's seconds, for one target and D proposers."""

    def __init__(self, measured: PassCosts, runs_model: Sequence[bool]) -> None:
        """
        Args:
            measured: at start-up; what is missing in it is learnt from the first steps.
            runs_model: whether each proposer runs a model.
        """
        target, known = _target_start(measured)
        drafters = [_draft_start(measured, i, float(target[0]), runs) for i, runs in enumerate(runs_model)]
        self._start: Floats = np.concatenate([target, *(values for values, _ in drafters)])
        self.measured = known
        """Whether the target's passes were measured at start-up."""
        self._known = [known, *(drafter_known for _, drafter_known in drafters)]
        self._drafted = [False] * len(drafters)
        self._stepped = False
        self._rows_seen: set[int] = set()
        self._new_on_end = 0
        size = self._start.size
        self._prior: Floats = np.array([_PACE_PRIOR, *_TARGET_PRIOR, *(_DRAFT_PRIOR * len(drafters))])
        for group, is_known in enumerate(self._known):
            if not is_known:
                self._prior[1 + self._first(group) : 1 + self._first(group + 1)] = _UNKNOWN_PRIOR
        self._state: Floats = np.zeros(1 + size)
        self._state[0] = 1.0
        self._covariance: Floats = np.diag(self._prior)
        # What a draft costs the target's pass after it is nothing until it is seen.
        self._paced: Floats = np.ones(size)
        self._paced[[self._first(group + 1) - 1 for group in range(1, len(self._known))]] = 0.0
        self._parts: Floats = self._start * self._paced
        self.target: Floats = self._parts[:_PASS_PARTS]
        """[11] seconds: fixed; a row in each range of ``BOUNDS``; a KV entry seen by a row. Changes in place."""
        self.drafters: tuple[Floats, ...] = tuple(
            self._parts[self._first(i + 1) : self._first(i + 2)] for i in range(len(drafters))
        )
        """For each proposer [5] seconds: a draft's start, a pass, a row, a row ingested on top, and what the target's
        pass takes more after it. Change in place."""

    @property
    def pace(self) -> float:
        """What everything takes at present, over what it took at start-up."""
        return float(self._state[0])

    def pass_s(self, rows: float, context: float) -> float:
        """Seconds of a target pass, see there."""
        return float(pass_s(self.target, rows, context))

    def observe(self, rows: int, context: int, seconds: float, drafting: Drafting | None) -> None:
        """A step was measured.

        Args:
            rows, context, seconds: of the target's pass, see ``pass_s``; 0 seconds = not known.
            drafting: None = none, or not known.
        """
        if not self._known[0] and rows and seconds > 0.0:
            self._rescale(0, seconds / self.pass_s(rows, context))
        at, passes, drawn, ingested, draft_s = 0, 0, 0, 0, 0.0
        if drafting is not None and not self._drafted[drafting.proposer]:
            self._drafted[drafting.proposer] = True  # the first time loads what it needs: that is no measure
        elif drafting is not None:
            at, passes, drawn = self._first(1 + drafting.proposer), drafting.passes, drafting.drawn
            ingested, draft_s = drafting.ingested, drafting.seconds
            if not self._known[1 + drafting.proposer] and draft_s > 0.0:
                self._rescale(1 + drafting.proposer, draft_s / self.draft_s(drafting))
        _observe(
            self._start,
            self._paced,
            self._state,
            self._covariance,
            self._prior,
            self._parts,
            rows,
            context,
            seconds,
            at,
            passes,
            drawn,
            ingested,
            draft_s,
        )

    def observe_whole(self, rows: int, context: int, seconds: float, drafting: Drafting | None) -> None:
        """A step was measured by a host that cannot tell its parts apart: they are learnt from how steps differ.

        Args:
            rows, context: of the target's pass.
            seconds: of the step.
            drafting: what was drafted in it; its own seconds are not looked at. None = nothing.
        """
        new = not self._stepped or (drafting is not None and not self._drafted[drafting.proposer])
        self._stepped = True
        if drafting is not None:
            self._drafted[drafting.proposer] = True
        if not rows or seconds <= 0.0 or self._is_new(rows) or new:
            return  # the first time loads what it needs: that is no measure
        at, passes, drawn = 0, 0, 0
        expected = self.pass_s(rows, context)
        if drafting is not None:
            at, passes, drawn = self._first(1 + drafting.proposer), drafting.passes, drafting.drawn
            expected += self.draft_s(drafting)
        if not self._known[0]:
            self._rescale(0, seconds / expected)
        _observe_whole(
            self._start,
            self._paced,
            self._state,
            self._covariance,
            self._prior,
            self._parts,
            rows,
            context,
            at,
            passes,
            drawn,
            seconds,
        )

    def _is_new(self, rows: int) -> bool:
        """Whether a whole step of so many rows is the first one, and not one of many such."""
        new = rows not in self._rows_seen and self._new_on_end < _NEW_IN_A_ROW
        self._new_on_end = self._new_on_end + 1 if new else 0
        self._rows_seen.add(rows)
        return new

    def draft_s(self, drafting: Drafting) -> float:
        """Seconds that drafting is expected to take."""
        start, one, row, late, _ = self.drafters[drafting.proposer].tolist()
        return float(start + one * drafting.passes + row * drafting.drawn + late * drafting.ingested)

    def _first(self, group: int) -> int:
        """Index of the first part of the target (0) or of a proposer (1 …)."""
        return 0 if group == 0 else _PASS_PARTS + (group - 1) * _DRAFT_PARTS

    def _rescale(self, group: int, by: float) -> None:
        """A start that was a guess takes its scale from the first measurement."""
        self._known[group] = True
        # Guesses about drafters rest on that about the target.
        others = [i for i, known in enumerate(self._known) if not known] if group == 0 else []
        for i in (group, *others):
            low, high = self._first(i), self._first(i + 1)
            self._start[low:high] *= by
            self._parts[low:high] *= by


def _target_start(measured: PassCosts) -> tuple[Floats, bool]:
    """The parts of a target pass by a measured curve, and whether there was one."""
    curve = measured.target or ((1, 1.0 + _TYPICAL_ROW), (2, 1.0 + 2 * _TYPICAL_ROW))
    least = _LEAST_ROW * curve[0][1]
    slopes = []
    for low, high in pairwise((*BOUNDS.tolist(), 2 * BOUNDS[-1])):
        slopes.append(max(least, (_along(curve, high) - _along(curve, max(1.0, low))) / (high - max(1.0, low))))
    fixed = max(0.1 * curve[0][1], curve[0][1] - slopes[0] * curve[0][0])
    return np.array([fixed, *slopes, measured.context_s or 1e-5 * fixed]), bool(measured.target)


def _draft_start(measured: PassCosts, proposer: int, target_s: float, runs_model: bool) -> tuple[Floats, bool]:
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
