"""Chance that a drafted token is accepted if all before it are. Formulas and a worked example: ``docs/auto.md``.

Of a model's draft it is ``σ(b[position] + u[request])`` before its proposer has shown what speaks for it, and once the
signal is known, ``σ(γ·z + w·s + d)``. Only what was verified teaches: the accepted tokens and the first rejection. What
lay behind it was never tested against the right context (the Kaplan–Meier view of a survival with censoring).

Of a looked-up token it is ``σ(d + w · s + u[request])``, s being log₂ of half the tokens that agree. The tokens before
it agree too, so its place in a draft is nothing beside the length of the match. What is special about a request is what
its matches do not explain: a text of which a part repeats itself has short matches that are wrong, and long ones that
are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit
from dynaspec.contract.signals import conditional, logit

from .settings import AutoSettings

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

POSITIONS = 8
"""Positions with a bias of their own; later ones share the last."""
_FARTHEST, _MOST_OFFSET = 8.0, 3.0
"""Biases and offsets are kept within ± these."""
_LEAST_WEIGHT, _EDGE = 0.05, 0.02
"""An outcome that was as good as certain still counts for something, and no mean of a few is as good as certain."""
_UNKNOWN: Floats = np.zeros(0)

_FIRST_CHANCE, _DOUBLING = 0.56, 0.8
"""Before anything is known: the chance of a token that two tokens' match offers, and what twice the match adds to z."""
_VARIANCE = (1.0, 0.02)
"""Of d and w, at most. That longer matches are right more often holds for any text: were that open, a single long one
that was wrong would end lookups for good."""


class _State(NamedTuple):
    bias: Floats
    information: Floats
    prior: Floats
    tied: Floats
    """[POSITIONS] what the position before counts for."""
    head: Floats
    """γ, w, d."""
    variance: Floats
    """[3, 3] of these, at most ``most`` [3]."""
    most: Floats
    counts: Floats
    """[slots, 4] accepted and rejected of each request, and both as expected of the average one."""
    latest: Floats
    """Nats by which the latest outcomes are told better by their mean; how much more was accepted than expected."""


@njit(cache=True, nogil=True)
def _sigmoid(z: float) -> float:
    return float(1.0 / (1.0 + np.exp(-z)))


@njit(cache=True, nogil=True)
def _pulled(s: _State, j: int, before: float) -> tuple[float, float]:
    """(what is expected of position j from the one before, what is believed of it)"""
    target = s.prior[0] if j == 0 else before + s.prior[j] - s.prior[j - 1]
    return target, target + (s.bias[j] - target) * s.information[j] / (s.information[j] + s.tied[j])


@njit(cache=True, nogil=True)
def _request_offset(counts: Floats, slot: int, shrinkage: float) -> float:
    """ln of (accepted / rejected) over the same as expected, shrunk."""
    if slot < 0:
        return 0.0
    right, wrong = counts[slot, 0] + shrinkage, counts[slot, 1] + shrinkage
    odds = right * (counts[slot, 3] + shrinkage) / (wrong * (counts[slot, 2] + shrinkage))
    return float(min(max(np.log(odds), -_MOST_OFFSET), _MOST_OFFSET))


@njit(cache=True, nogil=True)
def _offsets(counts: Floats, slots: Ints, shrinkage: float) -> Floats:
    return np.array([_request_offset(counts, slot, shrinkage) for slot in slots])


@njit(cache=True, nogil=True)
def _forget(s: _State, expected: float, right: float, surprise: float, recent: float) -> None:
    """As much as the latest outcomes surprise; ``expected`` was the chance of one that turned out ``right``."""
    mean = min(max(expected + s.latest[1], _EDGE), 1.0 - _EDGE)
    s.latest[0] += right * np.log(mean / expected) + (1.0 - right) * np.log((1.0 - mean) / (1.0 - expected))
    s.latest[1] += (right - expected - s.latest[1]) / recent
    if s.latest[0] > surprise:
        for j in range(s.information.size):
            s.information[j] *= np.exp(surprise - s.latest[0])
        s.tied[0] = max(_LEAST_WEIGHT, s.tied[0] * np.exp(surprise - s.latest[0]))  # nor does the prior hold
    s.latest[0] = min(max(s.latest[0], 0.0), surprise)


@njit(cache=True, nogil=True)
def _dot(row: Floats, x: tuple[float, float, float]) -> float:
    return float(row[0] * x[0] + row[1] * x[1] + row[2] * x[2])


@njit(cache=True, nogil=True)
def _learn_head(s: _State, x: tuple[float, float, float], accepted: float, memory: float) -> None:
    """A Newton step of γ, w and d; x: z, signal, 1."""
    v, p = s.variance, _sigmoid(_dot(s.head, x))
    weight = max(p * (1.0 - p), _LEAST_WEIGHT)
    spread = (_dot(v[0], x), _dot(v[1], x), _dot(v[2], x))
    total = 1.0 / weight + spread[0] * x[0] + spread[1] * x[1] + spread[2] * x[2]
    for i in range(3):
        s.head[i] += spread[i] / total * (accepted - p) / weight
        for j in range(3):
            v[i, j] -= spread[i] * spread[j] / total
        v[i, i] += (s.most[i] - v[i, i]) / memory


@njit(cache=True, nogil=True)
def _observe(
    s: _State, drafts: tuple[Ints, Ints, Ints, Ints, Ints], signal: Floats, settings: tuple[float, float, float, float]
) -> None:
    """One outcome after the other, see ``AcceptanceModel.observe``. An empty signal: the proposer has none."""
    (slots, drafted, tested, accepted, starts), (memory, surprise, recent, shrinkage), first = drafts, settings, 0
    for r in range(slots.size):
        before, judged, offset = 0.0, min(tested[r], drafted[r]), _request_offset(s.counts, slots[r], shrinkage)
        # A token that was cut because of its signal counts as likely as that made it: or only good ones would count.
        cut = signal.size > 0 and tested[r] == accepted[r] and judged < drafted[r]
        for j in range(min(starts[r], POSITIONS)):
            before = _pulled(s, j, before)[1]
        for position in range(judged + cut if slots[r] >= 0 else 0):
            j, right = min(starts[r] + position, POSITIONS - 1), 1.0 if position < accepted[r] else 0.0
            target, believed = _pulled(s, j, before)
            before, z = believed, believed + offset
            p, half = _sigmoid(believed), _sigmoid(believed + 0.5 * offset)
            if position == judged:
                right = _sigmoid(s.head[0] * z + s.head[1] * signal[first + position] + s.head[2])
            _forget(s, _sigmoid(z), right, surprise, recent)
            # What is special about a request may turn out to hold for all: half of it is left to be explained.
            s.information[j] = s.information[j] * (1.0 - 1.0 / memory) + max(half * (1.0 - half), _LEAST_WEIGHT)
            believed += (right - half) / (s.information[j] + s.tied[j])
            bias = believed + (believed - target) * s.tied[j] / s.information[j]
            s.bias[j] = min(max(bias, -_FARTHEST), _FARTHEST)
            for k, seen in enumerate((right, 1.0 - right, p, 1.0 - p)):
                s.counts[slots[r], k] += seen
            if signal.size and position < judged:
                _learn_head(s, (z, signal[first + position], 1.0), right, 4.0 * memory)
        first += drafted[r]


@njit(cache=True, nogil=True)
def _biases(s: _State) -> Floats:
    out, before = np.empty(POSITIONS), 0.0
    for j in range(POSITIONS):
        out[j] = before = _pulled(s, j, before)[1]
    return out


@njit(cache=True, nogil=True)
def _survival(
    s: _State, shrinkage: float, slots: Ints, lens: Ints, signal: Floats, bonus: Floats, longest: int
) -> Floats:
    biases, out, n = _biases(s), np.zeros((lens.size, longest)), 0
    for r in range(lens.size):
        reach, offset = 1.0, _request_offset(s.counts, slots[r], shrinkage)
        for j in range(lens[r]):
            z = biases[min(j, POSITIONS - 1)] + offset
            if signal.size:
                z = s.head[0] * z + s.head[2] + s.head[1] * signal[n]
            out[r, j] = reach * _sigmoid(z - s.head[1] * bonus[n] if bonus.size else z)
            reach *= _sigmoid(z)
            n += 1
    return out


def _seated(counts: Floats, slot: int, expected: float | None, usual: float, outcomes: float) -> Floats:
    """``_State.counts`` with a new request in a slot.

    Args:
        expected: acceptance that its caller expects, which counts for so many ``outcomes``; None = nothing.
        usual: of the average request.
    """
    if slot >= len(counts):
        counts = np.vstack([counts, np.zeros((1 + slot, 4))])
    counts[slot] = 0.0
    if expected is not None:
        counts[slot] = outcomes * np.array([expected, 1.0 - expected, usual, 1.0 - usual])
    return counts


class AcceptanceModel:
    """One proposer's. Requests have slots in it, see ``RequestSlots``.

    Args:
        settings: of learning.
        rates: acceptance per position of a saved profile (unconditional); empty = unknown.
        signal: whether the proposer has one.
        weights, variances: of γ, w and d before anything is known.
    """

    def __init__(
        self,
        settings: AutoSettings | None = None,
        *,
        rates: Sequence[float] = (),
        signal: bool = True,
        weights: tuple[float, float, float] = (0.0, 1.0, 0.0),
        variances: tuple[float, float, float] = (0.25, 0.25, 1.0),
    ) -> None:
        self.settings = on = settings or AutoSettings()
        self._has_signal = signal
        known = [logit(chance) for chance in conditional(rates)[:POSITIONS]] or [logit(on.prior)]
        prior = np.array(known + known[-1:] * (POSITIONS - len(known)))
        self._state = _State(
            bias=prior.copy(),
            information=np.zeros(POSITIONS),
            prior=prior,
            tied=np.full(POSITIONS, on.prior_information * (4.0 if rates else 1.0)),  # a profile is more than a guess
            head=np.array(weights if signal else (1.0, 0.0, 0.0)),
            variance=np.diag(np.array(variances)),
            most=np.array(variances),
            counts=np.zeros((1, 4)),
            latest=np.zeros(2),
        )

    @property
    def head(self) -> Floats:
        """γ, w, d."""
        return self._state.head

    def admit(self, slot: int, expected: float | None = None) -> None:
        """A new request takes a slot; ``expected`` is the acceptance that its caller expects, or None."""
        outcomes = 4.0 * self.settings.request_shrinkage
        counts = _seated(self._state.counts, slot, expected, self.chance(0), outcomes)
        self._state = self._state._replace(counts=counts)

    def pass_steps(self, steps: int) -> None:
        """So many steps have passed: what was seen of single requests grows old."""
        self._state.counts[:] *= np.exp(-steps / self.settings.request_memory)

    def observe(
        self, slots: Ints, drafted: Ints, tested: Ints, accepted: Ints, signal: Floats, starts: Ints | None = None
    ) -> None:
        """Learns from verified drafts.

        Args:
            slots: [B] of the requests; −1: nothing is to be learnt from this one.
            drafted: [B] tokens.
            tested: [B] tokens with a verdict: the accepted ones, and the first rejected one.
            accepted: [B]
            signal: [Σ drafted] of all drafted tokens, one request after the other.
            starts: [B] position of the first token; None = 0 of all. Later ones are of runs on a walk through a tree.
        """
        on, signal = self.settings, signal if self._has_signal else _UNKNOWN
        starts = np.zeros_like(slots) if starts is None else starts
        drafts, numbers = (
            (slots, drafted, tested, accepted, starts),
            (on.memory, on.surprise, on.recent, on.request_shrinkage),
        )
        _observe(self._state, drafts, signal, numbers)

    def biases(self) -> Floats:
        """[POSITIONS] z of a request like the average."""
        return np.asarray(_biases(self._state))

    def offsets(self, slots: Ints) -> Floats:
        """[B] by which z of these requests differs."""
        return np.asarray(_offsets(self._state.counts, slots, self.settings.request_shrinkage))

    def survival(
        self, slots: Ints, lens: Ints, longest: int, signal: Floats = _UNKNOWN, bonus: Floats = _UNKNOWN
    ) -> Floats:
        """[B, longest] Chance that a token and all before it are accepted; 0 behind a draft's end.

        Args:
            slots, lens: [B] of requests, or −1; of their drafts.
            signal: [Σ lens] of each token, one request after the other; empty: nothing has been drafted yet.
            bonus: [Σ lens] the part of it that depends on which token was drawn; it counts for the tokens behind only.
        """
        shrinkage = self.settings.request_shrinkage
        return np.asarray(_survival(self._state, shrinkage, slots, lens, signal, bonus, longest))

    def chance(self, position: int) -> float:
        """Conditional acceptance of a slot, of a request like the average."""
        return float(_sigmoid(self.biases()[min(position, POSITIONS - 1)]))

    def document(self) -> dict[str, object]:
        """What is believed, as plain JSON values."""
        gamma, weight, shift = self.head.tolist()
        return {
            "acceptance": [round(self.chance(j), 4) for j in range(POSITIONS)],
            "signal": {"weight": weight, "bias": (gamma * self.biases() + shift).tolist()},
        }


@njit(cache=True, nogil=True)
def _match_signal(match: int, position: int) -> float:
    return float(np.log2(0.5 * (max(match, 1) + position)))


@njit(cache=True, nogil=True)
def _observe_matches(
    line: Floats,
    variance: Floats,
    most: Floats,
    counts: Floats,
    runs: tuple[Ints, Ints, Ints, Ints],
    memory: float,
    shrinkage: float,
) -> None:
    """One token after the other: a Newton step of d and w."""
    slots, match, tested, right = runs
    for r in range(slots.size):
        offset = _request_offset(counts, slots[r], shrinkage)
        for j in range(tested[r] if slots[r] >= 0 else 0):
            s, outcome = _match_signal(match[r], j), 1.0 if j < right[r] else 0.0
            z = line[0] + line[1] * s
            usual, p = _sigmoid(z), _sigmoid(z + 0.5 * offset)  # half of what is special may turn out to hold for all
            weight = max(p * (1.0 - p), _LEAST_WEIGHT)
            spread = (variance[0, 0] + variance[0, 1] * s, variance[1, 0] + variance[1, 1] * s)
            total = 1.0 / weight + spread[0] + spread[1] * s
            for i in range(2):
                line[i] += spread[i] / total * (outcome - p) / weight
                for k in range(2):
                    variance[i, k] -= spread[i] * spread[k] / total
                variance[i, i] += (most[i] - variance[i, i]) / memory
            for k, seen in enumerate((outcome, 1.0 - outcome, usual, 1.0 - usual)):
                counts[slots[r], k] += seen


@njit(cache=True, nogil=True)
def _match_survival(
    line: Floats, counts: Floats, shrinkage: float, slots: Ints, match: Ints, lens: Ints, longest: int
) -> Floats:
    out = np.zeros((lens.size, longest))
    for r in range(lens.size):
        reach, offset = 1.0, _request_offset(counts, slots[r], shrinkage)
        for j in range(lens[r]):
            reach *= _sigmoid(line[0] + line[1] * _match_signal(match[r], j) + offset)
            out[r, j] = reach
    return out


class LookupModel:
    """Of one lookup. Requests have slots in it, as in ``AcceptanceModel``. A saved profile says nothing here: it has
    rates by position, and none by match."""

    def __init__(self, settings: AutoSettings) -> None:
        self._settings = settings
        self._line = np.array([np.log(_FIRST_CHANCE / (1.0 - _FIRST_CHANCE)), _DOUBLING])
        self._most = np.array(_VARIANCE)
        self._variance = np.diag(self._most)
        self._counts: Floats = np.zeros((1, 4))

    def admit(self, slot: int, expected: float | None = None) -> None:
        """A new request takes a slot; ``expected`` is the acceptance that its caller expects, or None."""
        outcomes = 4.0 * self._settings.request_shrinkage
        self._counts = _seated(self._counts, slot, expected, _FIRST_CHANCE, outcomes)

    def pass_steps(self, steps: int) -> None:
        """So many steps have passed: what was seen of single requests grows old."""
        self._counts[:] *= np.exp(-steps / self._settings.request_memory)

    def observe(self, slots: Ints, match: Ints, tested: Ints, right: Ints) -> None:
        """Learns from offers, drafted or not.

        Args:
            slots: [B] of the requests; −1: nothing is to be learnt from this one.
            match: [B] lengths of the matches.
            tested: [B] tokens with a verdict: those that were right, and the first that was not.
            right: [B]
        """
        on, runs = self._settings, (slots, match, tested, right)
        numbers = 4.0 * on.memory, on.request_shrinkage
        _observe_matches(self._line, self._variance, self._most, self._counts, runs, *numbers)

    def survival(self, slots: Ints, match: Ints, lens: Ints, longest: int) -> Floats:
        """[B, longest] Chance that a token and all before it are right; 0 behind a draft's end.

        Args:
            slots, match, lens: [B] of requests, or −1; of their matches and drafts.
        """
        shrinkage = self._settings.request_shrinkage
        return np.asarray(_match_survival(self._line, self._counts, shrinkage, slots, match, lens, longest))

    def document(self) -> dict[str, object]:
        """What is believed, as plain JSON values: of drafts that a match of two tokens offers."""
        shift, weight = self._line.tolist()
        chances = [round(float(_sigmoid(shift + weight * _match_signal(2, j))), 4) for j in range(POSITIONS)]
        return {"acceptance": chances, "signal": {"weight": weight, "bias": [shift] * POSITIONS}}


class LaterChoices:
    """How often a drafter's second and later choices are accepted, over the probability that it gives them."""

    def __init__(self, settings: AutoSettings) -> None:
        self._memory = settings.memory
        self._accepted = self._expected = settings.request_shrinkage

    @property
    def ratio(self) -> float:
        return self._accepted / self._expected

    def observe(self, probabilities: Sequence[float], tested: Sequence[int]) -> None:
        """Children of an accepted token, as ``StepOutcome.tested`` tells them."""
        for probability, node in zip(probabilities, tested, strict=True):
            keep = 1.0 - probability / self._memory
            self._accepted = keep * self._accepted + (node >= 0)
            self._expected = keep * self._expected + probability


class RequestSlots:
    """Rows of running requests in acceptance models; those of ended ones are handed out again."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._free: list[int] = []

    def of(self, ids: Sequence[str]) -> Ints:
        """[B] Slots; −1 for requests that have none."""
        return np.array([self._of.get(request, -1) for request in ids], dtype=np.int64)

    def add(self, request: str) -> int:
        """A slot for one that has none."""
        self._of[request] = slot = self._free.pop() if self._free else len(self._of)
        return slot

    def release(self, ids: Sequence[str]) -> None:
        """These requests have ended."""
        self._free.extend(self._of.pop(request) for request in ids if request in self._of)
