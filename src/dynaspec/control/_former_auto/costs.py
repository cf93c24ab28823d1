"""What a step takes, kept current from measured steps.

Start-up gives each of a step's ``parts`` a value. What is learnt are multipliers of these, by a Kalman filter: one, the
pace, common to all parts, which moves fast, as machines slow down and speed up as a whole; and one a part, slow. So a
slow minute of plain decoding does not make drafting look cheap, and one step of the other kind now and then is enough
to keep the two comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from dynaspec.contract.costs import PassCosts

from .parts import BOUNDS, DRAFT_PARTS, PASS_PARTS, draft_start, pass_features, pass_s, target_start

Floats = npt.NDArray[np.float64]

_PACE_PRIOR, _UNKNOWN_PRIOR = 0.01, 1.0
"""Variances of multipliers at the start: of the pace, as start-up was just now; of parts that it has not measured."""
_TARGET_PRIOR = (0.06, *(0.03 for _ in BOUNDS), 0.25, 0.25)
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
_LEAST, _LEAST_PACE = 0.05, 1e-3
"""Of a part's start-up value at the present pace, and of the pace: start-up may have been measured while something else
had the cores."""


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
    least = _LEAST * max(_LEAST_PACE, state[0])
    for i in range(parts.size):
        parts[i] = start[i] * max(least * paced[i], paced[i] * state[0] + state[1 + i])


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
def _observe(
    start: Floats,
    paced: Floats,
    state: Floats,
    covariance: Floats,
    prior: Floats,
    parts: Floats,
    rows: float,
    context: float,
    read: float,
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
        features = pass_features(parts.size, rows, context, read)
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
    read: float,
    at: int,
    passes: float,
    drawn: float,
    seconds: float,
) -> None:
    """One step whose seconds are those of its target pass and of its drafting together; 0 passes = no drafting."""
    _age(state, covariance, prior, _WHOLE_RETURN)
    features = pass_features(parts.size, rows, context, read)
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
        target, known = target_start(measured)
        drafters = [draft_start(measured, i, float(target[0]), runs) for i, runs in enumerate(runs_model)]
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
        self.target: Floats = self._parts[:PASS_PARTS]
        """[12] seconds: fixed; a row in each range of ``BOUNDS``; a KV entry read for a request, and one seen by a row.
        Changes in place."""
        self.drafters: tuple[Floats, ...] = tuple(
            self._parts[self._first(i + 1) : self._first(i + 2)] for i in range(len(drafters))
        )
        """For each proposer [5] seconds: a draft's start, a pass, a row, a row ingested on top, and what the target's
        pass takes more after it. Change in place."""

    @property
    def pace(self) -> float:
        """What everything takes at present, over what it took at start-up."""
        return float(self._state[0])

    def pass_s(self, rows: float, context: float, read: float) -> float:
        """Seconds of a target pass, see there."""
        return float(pass_s(self.target, rows, context, read))

    def observe(self, rows: int, context: int, read: float, seconds: float, drafting: Drafting | None) -> None:
        """A step was measured.

        Args:
            rows, context, read, seconds: of the target's pass, see ``pass_s``; 0 seconds = not known.
            drafting: None = none, or not known.
        """
        if not self._known[0] and rows and seconds > 0.0:
            self._rescale(0, seconds / self.pass_s(rows, context, read))
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
            read,
            seconds,
            at,
            passes,
            drawn,
            ingested,
            draft_s,
        )

    def observe_whole(self, rows: int, context: int, read: float, seconds: float, drafting: Drafting | None) -> None:
        """A step was measured by a host that cannot tell its parts apart: they are learnt from how steps differ.

        Args:
            rows, context, read: of the target's pass.
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
        expected = self.pass_s(rows, context, read)
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
            read,
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
        return 0 if group == 0 else PASS_PARTS + (group - 1) * DRAFT_PARTS

    def _rescale(self, group: int, by: float) -> None:
        """A start that was a guess takes its scale from the first measurement."""
        self._known[group] = True
        self._scale(self._first(group), self._first(group + 1), by)
        if group:
            return
        for i, known in enumerate(self._known[1:], 1):  # guesses about drafters rest on that about the target, …
            last = self._first(i + 1)
            self._scale(last - 1 if known else self._first(i), last, by)  # … of a measured one what it leaves behind

    def _scale(self, low: int, high: int, by: float) -> None:
        self._start[low:high] *= by
        self._parts[low:high] *= by
