"""What a step costs, by the work that it does; kept current from measured steps.

    step seconds = speed factor · (T(rows) + host + KV prices + drafting)

T is piecewise linear between the rows at which the host timed its passes (``PassCosts``). Every term is a start-up
value times e^(learnt exponent). A Kalman filter learns the exponents from the logarithms of measured over expected
seconds: one common to all, the speed factor, which moves fast, as machines slow down and speed up as a whole; and one a
term, slow. So a slow minute of plain decoding does not make drafting look cheap. Formulas: ``docs/auto.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit
from dynaspec.contract.costs import Drafting, PassCosts
from dynaspec.contract.step import ProposerTraits

from .settings import AutoSettings

Floats = npt.NDArray[np.float64]

_HOST, _READ, _SEEN, _REST = 0, 1, 2, 3
"""Terms of the target's pass other than its curve: what the host does around it, a KV entry read for a request, however
many rows see it, and one seen by a row."""
_DRAFT = 5
"""Terms of drafting: its start, a pass, a row that a token is drawn from, a row that is only read in, and what the
target's pass takes more after it, as the caches have been used."""
_ROWS_GUESS, _ROW_GUESS, _REST_GUESS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096), 0.03, (0.05, 2e-6, 2e-7)
_DRAFT_GUESS, _LOOKUP_GUESS = (0.02, 0.1, 0.002, 0.0014, 0.02), (1e-3, 0.0, 0.0, 0.0, 0.02)
_READ_IN_GUESS = 0.7
"""Guesses until there are measurements: of a row, other terms and drafting as shares of a pass of one row, and of a row
that is only read in as a share of one that a token is drawn from."""
_UNKNOWN, _NEIGHBOURS = 0.9, 0.6
"""Deviation of what start-up has not measured; correlation of what it got wrong at neighbouring points of the curve."""
_DISTURBED = 3.0
"""Deviations of a measured time beyond which a step was disturbed: it counts less, the farther off."""


class MeasuredStep(NamedTuple):
    """A step and its seconds."""

    rows: float
    """Of the target's pass; see ``StepCosts.target_s``, also for the next two."""
    read: float
    seen: float
    rest_s: float
    """Seconds of all but drafting."""
    draft_s: float = -1.0
    """Of drafting; below 0 = not known: ``rest_s`` is of the whole step."""
    proposer: int = -1
    """Whose drafts they were; below 0 = there were none."""
    passes: int = 0
    drawn: int = 0
    read_in: int = 0
    """As in ``Drafting``."""
    usual: bool = True
    """False leaves the speed factor as it is: what a probe costs is not taken for a slower machine."""

    def with_drafting(self, drafting: Drafting) -> MeasuredStep:
        """The same step, in which that was done to draft."""
        work = (drafting.proposer, drafting.passes, drafting.drawn, drafting.read_in)
        return MeasuredStep(*self[:5], *work, self.usual)


class _State(NamedTuple):
    knots: Floats
    start: Floats
    """Seconds of each term at start-up."""
    exponents: Floats
    """The common one, then one a term."""
    covariance: Floats
    terms: Floats
    """Seconds of each term now."""


@njit(cache=True, nogil=True)
def target_s(knots: Floats, curve: Floats, rows: float) -> float:
    """Seconds of a target pass over so many rows, its context apart."""
    i = 1
    while i < knots.size - 1 and knots[i] < rows:
        i += 1
    share = (rows - knots[i - 1]) / (knots[i] - knots[i - 1])
    return float(curve[i - 1] + share * (curve[i] - curve[i - 1]))


@njit(cache=True, nogil=True)
def row_price_s(knots: Floats, curve: Floats, rows: float, more: float) -> float:
    """Seconds of a row beyond ``rows`` where up to ``more`` follow: the least average on the way there, as a tile that
    is begun is paid for by all that fill it."""
    start, least, most = target_s(knots, curve, rows), np.inf, rows + more
    for i in range(knots.size + 1):
        end = most if i == knots.size else knots[i]
        if rows < end <= most:
            least = min(least, (target_s(knots, curve, end) - start) / (end - rows))
    return float(max(least, 0.0))


@njit(cache=True, nogil=True)
def _learn(s: _State, work: Floats, seconds: float, noise: float, usual: bool) -> None:
    """Takes in one measured time, of which work · terms was expected."""
    expected = work @ s.terms
    if expected <= 0.0 or seconds <= 0.0:
        return
    share, error = np.ones(s.exponents.size), np.log(seconds / expected)
    for i in range(work.size):
        share[1 + i] = work[i] * s.terms[i] / expected
    spread = s.covariance @ share
    deviation = max(noise, float(abs(error)) / _DISTURBED)
    variance = share @ spread + deviation * deviation
    gain = spread / variance
    if not usual:  # the speed factor and the target's terms are taken as they are, with their uncertainty
        gain[: 1 + s.knots.size + _REST] = 0.0
    for i in range(gain.size):
        s.exponents[i] += gain[i] * error
        for j in range(gain.size):
            s.covariance[i, j] += variance * gain[i] * gain[j] - gain[i] * spread[j] - spread[i] * gain[j]
    for i in range(s.terms.size):
        s.terms[i] = s.start[i] * np.exp(s.exponents[0] + s.exponents[1 + i])


@njit(cache=True, nogil=True)
def _observe(s: _State, steps: Floats, noise: float, drift: float) -> Floats:
    """steps: [n, 10], a row is a ``MeasuredStep``. Returns the curve."""
    knots = s.knots
    for n in range(len(steps)):
        rows, read, seen, rest_s, draft_s, proposer = steps[n, :6]
        s.covariance[0, 0] += drift * drift
        work, usual = np.zeros(s.terms.size), steps[n, 9] > 0.0
        if proposer >= 0.0:
            at = knots.size + _REST + _DRAFT * int(proposer)
            work[at], work[at + 1], work[at + 2], work[at + 3] = 1.0, steps[n, 6], steps[n, 7], steps[n, 8]
            if draft_s >= 0.0:
                _learn(s, work, draft_s, noise, usual)
                work[:] = 0.0
            work[at + 4] = 1.0
        if rows >= 1.0:
            i = 1
            while i < knots.size - 1 and knots[i] < rows:
                i += 1
            share = min((rows - knots[i - 1]) / (knots[i] - knots[i - 1]), 1.0)
            work[i - 1], work[i], work[knots.size + _HOST] = 1.0 - share, share, 1.0
            work[knots.size + _READ], work[knots.size + _SEEN] = read, seen
            _learn(s, work, rest_s, noise, usual)
    return np.asarray(_curve(s))


@njit(cache=True, nogil=True)
def _curve(s: _State) -> Floats:
    """The curve, made non-decreasing: neighbours that fall are pooled, by how well each is known."""
    weight, value = np.empty(s.knots.size), s.terms[: s.knots.size].copy()
    for i in range(weight.size):
        weight[i] = 1.0 / (s.covariance[1 + i, 1 + i] + 1e-9)
    for i in range(1, value.size):
        first = i
        while first > 0 and value[first - 1] > value[i]:
            first -= 1
            while first > 0 and value[first - 1] == value[first]:
                first -= 1
            value[first : i + 1] = (value[first : i + 1] * weight[first : i + 1]).sum() / weight[first : i + 1].sum()
    return value


class StepCosts:
    """Prices of a step's work, for one target and its proposers.

    Args:
        measured: at start-up; what is missing in it is learnt from the first steps.
        proposers: of the host.
        settings: of learning.
    """

    def __init__(
        self, measured: PassCosts, proposers: Sequence[ProposerTraits], settings: AutoSettings | None = None
    ) -> None:
        self._settings = settings or AutoSettings()
        self._scaled = bool(measured.target)
        points = measured.target_points() or [(float(n), 1.0 + _ROW_GUESS * (n - 1)) for n in _ROWS_GUESS]
        one_s, drafters = points[0][1], []
        for i, traits in enumerate(proposers):
            known = measured.draft(i)
            if traits.passes_per_draft == "none" or known is None:
                guess = _LOOKUP_GUESS if traits.passes_per_draft == "none" else _DRAFT_GUESS
                drafters.append(one_s * np.array(guess))
            else:
                drafters.append(np.array([*known, _READ_IN_GUESS * known[2], _DRAFT_GUESS[4] * one_s]))
        idle = [one for one, traits in zip(drafters, proposers, strict=True) if traits.idle_pass]
        # A pass that runs in every step, over the rows of the target's, is a part of that.
        target = [seconds + sum(start + one + row * rows for start, one, row, _, _ in idle) for rows, seconds in points]
        host, read, seen = (one_s * guess for guess in _REST_GUESS)
        target += [host, measured.read_s or read, measured.context_s or seen]
        self._state = _State(
            knots=np.array([rows for rows, _ in points], dtype=np.float64),
            start=np.concatenate([np.array(target), *drafters]),
            exponents=np.zeros(1 + len(target) + sum(map(len, drafters))),
            covariance=self._prior(
                len(points), len(measured.target), [measured.draft(i) is not None for i in range(len(proposers))]
            ),
            terms=np.concatenate([np.array(target), *drafters]),
        )
        self.planning_s = self._settings.planning_s
        """Of making a plan."""
        self.curve: Floats = _curve(self._state)
        """[m] seconds of passes over ``knots`` rows, context apart, at the present speed; non-decreasing."""

    def _prior(self, knots: int, timed: int, known: Sequence[bool]) -> Floats:
        error, at = self._settings.error, np.arange(knots)
        # What start-up has measured wrongly is mostly so at all larger sizes; the first point is what all else is
        # relative to. What it has not measured is as uncertain everywhere.
        deviation = np.where(at < timed, error * np.minimum(at, 2.0) / 2.0, _UNKNOWN)
        rest = [_UNKNOWN] * _REST
        for one in known:
            rest += [_UNKNOWN, *(3 * [2.0 * error if one else _UNKNOWN]), _UNKNOWN]
        covariance = np.diag([(2.0 * error) ** 2, *([0.0] * knots), *(one**2 for one in rest)])
        curve = covariance[1 : 1 + knots, 1 : 1 + knots]
        curve += np.outer(deviation, deviation) * _NEIGHBOURS ** np.abs(np.subtract.outer(at, at))
        curve[0, 0] += (0.3 * error) ** 2
        return covariance

    @property
    def knots(self) -> Floats:
        """[m] rows at which the curve has points."""
        return self._state.knots

    @property
    def speed_factor(self) -> float:
        """What everything takes at present, over what it took at start-up; > 0."""
        return float(np.exp(self._state.exponents[0]))

    @property
    def rest_s(self) -> tuple[float, float, float]:
        """Seconds of a step outside its passes, for a KV entry of a request, and for one that a row sees."""
        host, read, seen = self._state.terms[self.knots.size : self.knots.size + _REST].tolist()
        return host, read, seen

    def draft_terms(self, proposer: int) -> tuple[float, float, float, float]:
        """Seconds of a draft's start (what follows in the target's pass included), a pass, a row, a row read in."""
        first = self._first(proposer)
        start, one, row, read_in, after = self._state.terms[first : first + _DRAFT].tolist()
        return start + after, one, row, read_in

    def target_s(self, rows: float, read: float, seen: float) -> float:
        """Seconds of a step that decodes plainly, of a pass over so many rows.

        Args:
            read: Σ over the requests of their KV entries.
            seen: Σ over the rows of the KV entries that each sees.
        """
        host_s, read_s, seen_s = self.rest_s
        return float(target_s(self.knots, self.curve, max(rows, 1.0)) + host_s + read_s * read + seen_s * seen)

    def prompt_s(self, requests: int, rows: int) -> float:
        """Seconds that so many rows of prompts take more in a step that decodes ``requests``."""
        knots, curve, alone = self.knots, self.curve, float(max(requests, 1))
        return float(target_s(knots, curve, alone + rows) - target_s(knots, curve, alone))

    def draft_s(self, drafting: Drafting) -> float:
        """Seconds that drafting takes, and what the target's pass takes more after it."""
        start, one, row, read_in = self.draft_terms(drafting.proposer)
        return start + one * drafting.passes + row * drafting.drawn + read_in * drafting.read_in

    def observe(self, *steps: MeasuredStep) -> None:
        """These steps were measured."""
        for rows, read, seen, rest_s, draft_s, *drafting, _ in () if self._scaled else steps:
            if rows and rest_s > 0.0 and not self._scaled:
                expected = self.target_s(rows, read, seen)
                if draft_s < 0.0 and drafting[0] >= 0:
                    expected += self.draft_s(Drafting(*map(int, drafting)))
                self._scaled = True
                self._state.start[:] *= rest_s / expected  # guesses have no scale of their own
                self._state.terms[:] *= rest_s / expected
        if steps:
            self.curve = _observe(self._state, np.array(steps), self._settings.noise, self._settings.drift)

    def observe_planning(self, seconds: float) -> None:
        """Making a plan took so long. Their logarithms are averaged: single ones are disturbed."""
        self.planning_s *= (seconds / self.planning_s) ** (1.0 / self._settings.prior_steps)

    def document(self, proposer: int) -> dict[str, float]:
        """What drafting costs, as plain JSON values."""
        return dict(zip(("start_s", "pass_s", "row_s", "read_in_row_s"), self.draft_terms(proposer), strict=True))

    def _first(self, proposer: int) -> int:
        return self.knots.size + _REST + _DRAFT * proposer
