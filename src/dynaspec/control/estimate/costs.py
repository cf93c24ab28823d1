"""What a step costs, by the work that it does; kept current from measured steps.

    step seconds = speed factor · (T(rows) + host + KV prices + drafting)

T is piecewise linear between the rows at which the host timed its passes (``PassCosts``). Every term is a start-up
value times e^(learnt exponent). A Kalman filter learns the exponents from the logarithms of measured over expected
seconds: one common to all, the speed factor, which moves fast, as machines slow down and speed up as a whole; and one a
term, slow. So a slow minute of plain decoding does not make drafting look cheap. Formulas: ``docs/auto.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import ProposerTraits
from dynaspec.contract.work import Drafting

Floats = npt.NDArray[np.float64]

_HOST, _READ, _SEEN, _REST = 0, 1, 2, 3
"""Terms of the target's pass beside its curve: what the host does around it, a KV entry read for a request, however
many rows see it, and one seen by a row."""
_DRAFT = 5
"""Terms of drafting: its start, a pass, a row that a token is drawn from, a row that is only read in, and what the
target's pass takes more after it, as the caches have been used."""
_UNKNOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096)
_TYPICAL_ROW, _TYPICAL_HOST, _TYPICAL_READ, _TYPICAL_SEEN = 0.03, 0.05, 2e-6, 2e-7
_TYPICAL_DRAFT = (0.02, 0.1, 0.002, 0.0014, 0.02)
"""Guesses, as shares of a pass of one row, until there are measurements."""
_LOOKUP_START, _READ_IN = 1e-3, 0.7
"""The price of a lookup, as such a share; a row that is only read in, of one that a token is drawn from as well."""
_LIKE_NEIGHBOURS = 0.6
"""Correlation of what start-up got wrong at neighbouring points of the curve."""
_UNKNOWN, _SPEED_PRIOR = 0.9, 0.1
"""Deviation of what start-up has not measured; variance of the speed factor at first, as start-up may be disturbed."""
_DISTURBED = 0.4
"""Logarithm of measured over expected seconds beyond which a step was disturbed: it counts less, the farther off."""
_STILL = 0.05
"""What is left of the speed factor's deviation where it is taken for known."""


@dataclass(frozen=True, slots=True)
class CostSettings:
    """How costs are learnt; standard deviations of logarithms. ``docs/auto.md`` shows how little each matters."""

    error: float = 0.15
    """Of what start-up has measured of drafting and of the curve's slope."""
    noise: float = 0.12
    """Of a measured time."""
    drift: float = 0.007
    """Of the speed factor's change in a step."""


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
    share, p = np.ones(s.exponents.size), s.covariance
    share[1:] = work * s.terms / expected
    if not usual:
        p[0, :] *= _STILL
        p[:, 0] *= _STILL
    gain = p @ share
    error = np.log(seconds / expected)
    variance = share @ gain + (noise * np.maximum(1.0, np.abs(error) / _DISTURBED)) ** 2
    s.exponents[:] += gain / variance * error
    for i in range(share.size):
        p[i, :] -= gain[i] / variance * gain
    if not usual:
        p[0, :] /= _STILL
        p[:, 0] /= _STILL
    s.terms[:] = s.start * np.exp(s.exponents[0] + s.exponents[1:])


@njit(cache=True, nogil=True)
def _observe(
    s: _State,
    target: Floats,
    at: int,
    drafting: Floats,
    rest_s: float,
    draft_s: float,
    noise: float,
    drift: float,
    usual: bool,
) -> Floats:
    """One step. target: rows, read, seen. at: drafting's first term, 0 = none. draft_s < 0: rest_s is of the whole."""
    s.covariance[0, 0] += drift * drift
    work, knots = np.zeros(s.terms.size), s.knots
    if at:
        work[at : at + 4] = drafting
        if draft_s >= 0.0:
            _learn(s, work, draft_s, noise, usual)
            work[:] = 0.0
        work[at + 4] = 1.0
    if target[0] >= 1.0:
        i = 1
        while i < knots.size - 1 and knots[i] < target[0]:
            i += 1
        share = min((target[0] - knots[i - 1]) / (knots[i] - knots[i - 1]), 1.0)
        work[i - 1], work[i], work[knots.size + _HOST] = 1.0 - share, share, 1.0
        work[knots.size + _READ : knots.size + _REST] = target[1:]
        _learn(s, work, rest_s, noise, usual)
    return np.asarray(_curve(s))


@njit(cache=True, nogil=True)
def _curve(s: _State) -> Floats:
    """The curve, made non-decreasing: neighbours that fall are pooled, by how well each is known."""
    weight = 1.0 / (np.diag(s.covariance)[1 : 1 + s.knots.size] + 1e-9)
    value: Floats = s.terms[: s.knots.size].copy()
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
        self, measured: PassCosts, proposers: Sequence[ProposerTraits], settings: CostSettings | None = None
    ) -> None:
        self._settings = settings or CostSettings()
        self._measured = self._scaled = bool(measured.target)
        points = measured.target_points() or [(float(n), 1.0 + _TYPICAL_ROW * (n - 1)) for n in _UNKNOWN_ROWS]
        one_s, drafters = points[0][1], []
        for i, traits in enumerate(proposers):
            known = measured.draft(i)
            if traits.passes_per_draft == "none":
                drafters.append(one_s * np.array([_LOOKUP_START, 0.0, 0.0, 0.0, 0.0]))
            elif known is None:
                drafters.append(one_s * np.array(_TYPICAL_DRAFT))
            else:
                drafters.append(np.array([*known, _READ_IN * known[2], _TYPICAL_DRAFT[4] * one_s]))
        idle = [one for one, traits in zip(drafters, proposers, strict=True) if traits.idle_pass]
        # A pass that runs in every step, over the rows of the target's, is a part of that.
        target = [seconds + sum(start + one + row * rows for start, one, row, _, _ in idle) for rows, seconds in points]
        target += [_TYPICAL_HOST * one_s, measured.read_s or _TYPICAL_READ * one_s]
        target += [measured.context_s or _TYPICAL_SEEN * one_s]
        start = np.concatenate([np.array(target), *drafters])
        self._state = _State(
            knots=np.array([rows for rows, _ in points], dtype=np.float64),
            start=start,
            exponents=np.zeros(1 + start.size),
            covariance=self._prior(
                len(points), len(measured.target), [measured.draft(i) is not None for i in range(len(proposers))]
            ),
            terms=start.copy(),
        )
        self.curve: Floats = _curve(self._state)
        """[m] seconds of passes over ``knots`` rows, context apart, at the present speed; non-decreasing."""

    def _prior(self, knots: int, timed: int, known: Sequence[bool]) -> Floats:
        error = self._settings.error
        # What start-up has measured wrongly is mostly so at all larger sizes; the first point is what all else is
        # relative to. What it has not measured is as uncertain everywhere.
        at = np.arange(knots)
        deviation = np.where(at < timed, error * np.minimum(at, 2.0) / 2.0, _UNKNOWN)
        near = _LIKE_NEIGHBOURS ** np.abs(np.subtract.outer(np.arange(knots), np.arange(knots)))
        rest = [_UNKNOWN] * _REST
        for one in known:
            rest += [_UNKNOWN, *(3 * [2.0 * error if one else _UNKNOWN]), _UNKNOWN]
        covariance = np.diag([_SPEED_PRIOR, *([0.0] * knots), *(one**2 for one in rest)])
        covariance[1 : 1 + knots, 1 : 1 + knots] = np.outer(deviation, deviation) * near
        covariance[1, 1] += (0.3 * error) ** 2
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
    def host_s(self) -> float:
        """Seconds of a step beside its passes."""
        return float(self._state.terms[self.knots.size + _HOST])

    @property
    def read_s(self) -> float:
        """Seconds for a KV entry of a request."""
        return float(self._state.terms[self.knots.size + _READ])

    @property
    def seen_s(self) -> float:
        """Seconds for a KV entry that a row sees."""
        return float(self._state.terms[self.knots.size + _SEEN])

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
        context_s = self.read_s * read + self.seen_s * seen
        return float(target_s(self.knots, self.curve, max(rows, 1.0)) + self.host_s + context_s)

    def draft_s(self, drafting: Drafting) -> float:
        """Seconds that drafting takes, and what the target's pass takes more after it."""
        start, one, row, read_in = self.draft_terms(drafting.proposer)
        return start + one * drafting.passes + row * drafting.drawn + read_in * drafting.read_in

    def observe(
        self,
        rows: int,
        read: float,
        seen: float,
        rest_s: float,
        drafting: Drafting | None,
        draft_s: float | None,
        *,
        usual: bool = True,
    ) -> None:
        """A step was measured.

        Args:
            rows, read, seen: of the target's pass, see ``target_s``.
            rest_s: seconds of all but drafting.
            drafting: None = none.
            draft_s: its seconds; None = not known: ``rest_s`` is of the whole step.
            usual: False leaves the speed factor as it is: what a probe costs is not taken for a slower machine.
        """
        if not self._scaled and rows and rest_s > 0.0:
            expected = self.target_s(rows, read, seen)
            expected += self.draft_s(drafting) if draft_s is None and drafting is not None else 0.0
            self._scaled = True
            self._state.start[:] *= rest_s / expected  # guesses have no scale of their own
            self._state.terms[:] *= rest_s / expected
        at, work = 0, np.zeros(4)
        if drafting is not None:
            at, work = (
                self._first(drafting.proposer),
                np.array([1.0, drafting.passes, drafting.drawn, drafting.read_in]),
            )
        target, seconds = np.array([rows, read, seen], dtype=np.float64), -1.0 if draft_s is None else draft_s
        on = self._settings
        self.curve = _observe(self._state, target, at, work, rest_s, seconds, on.noise, on.drift, usual)

    def document(self, proposer: int) -> dict[str, float]:
        """What drafting costs, as plain JSON values."""
        return dict(zip(("start_s", "pass_s", "row_s", "read_in_row_s"), self.draft_terms(proposer), strict=True))

    def _first(self, proposer: int) -> int:
        return self.knots.size + _REST + _DRAFT * proposer
