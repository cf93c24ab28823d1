"""How likely drafted tokens are to be accepted: one discounted online logistic regression per proposer.

``P(slot accepted | all slots before it were) = σ(z)`` with ``z = bias[position] + offset[request]``; once the proposer
has shown its signal s for the token, ``σ(γ·z + w·s + d)``. Formulas and a worked example: ``docs/auto.md``.

Only what was verified teaches: the accepted tokens and the first rejection. What lay behind it was never tested against
the right context (the Kaplan–Meier view of a survival with censoring).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from dynaspec.contract.signals import conditional, logit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

POSITIONS = 8
"""Positions with a bias of their own; later ones share the last."""
_FARTHEST, _MOST_OFFSET = 8.0, 3.0
"""Biases and offsets are kept within ± these."""
_LEAST_WEIGHT = 0.05
"""An outcome that was as good as certain still counts for something."""
_RECENT, _EDGE = 8.0, 0.02
"""Outcomes whose mean chances are held against, and how close to 0 and 1 it may take them."""


@dataclass(frozen=True, slots=True)
class AcceptanceSettings:
    """How fast acceptance is learnt and forgotten. ``docs/auto.md`` shows how little each matters."""

    prior: float = 0.7
    """Chance of a slot before anything is known."""
    prior_information: float = 0.5
    """What the prior counts for. One outcome of chance p brings p·(1 − p)."""
    neighbour_information: float = 1.0
    """What a position counts for at the next one: one of which little is known is taken for like the one before."""
    memory: float = 256.0
    """Outcomes at a position after which an earlier one counts e times less there."""
    surprise: float = 2.0
    """Nats by which the mean of the latest outcomes may tell them better; e times more is forgotten for each beyond."""
    request_memory: float = 32.0
    """Steps after which what was seen of a request counts e times less."""
    request_shrinkage: float = 2.0
    """Outcomes like the average request's that a request's own are joined to."""


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
    drift: Floats
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
def _offsets(counts: Floats, slots: Ints, shrinkage: float) -> Floats:
    """ln of (accepted / rejected) over the same as expected, shrunk."""
    out = np.zeros(slots.size)
    for r in range(slots.size):
        if slots[r] >= 0:
            a, b, p, q = counts[slots[r]] + shrinkage
            out[r] = min(max(np.log(a * q / (b * p)), -_MOST_OFFSET), _MOST_OFFSET)
    return out


@njit(cache=True, nogil=True)
def _learn_head(s: _State, z: float, signal: float, accepted: float, memory: float) -> None:
    """A Newton step of γ, w and d."""
    x = np.array([z, signal, 1.0])
    p = _sigmoid(s.head @ x)
    weight = max(p * (1.0 - p), _LEAST_WEIGHT)
    spread = s.variance @ x
    total = 1.0 / weight + spread @ x
    for i in range(3):
        s.head[i] += spread[i] / total * (accepted - p) / weight
        for j in range(3):
            s.variance[i, j] -= spread[i] * spread[j] / total
        s.variance[i, i] += (s.most[i] - s.variance[i, i]) / memory


@njit(cache=True, nogil=True)
def _observe(
    s: _State,
    slots: Ints,
    drafted: Ints,
    tested: Ints,
    accepted: Ints,
    signal: Floats,
    has_signal: bool,
    memory: float,
    surprise: float,
    shrinkage: float,
) -> None:
    """One outcome after the other, see ``AcceptanceModel.observe``."""
    first = 0
    for r in range(slots.size):
        slot, before, judged = slots[r], 0.0, min(tested[r], drafted[r])
        offset = _offsets(s.counts, slots[r : r + 1], shrinkage)[0]
        # A token that was cut because of its signal counts as likely as that made it: or only good ones would count.
        cut = has_signal and tested[r] == accepted[r] and judged < drafted[r]
        for position in range(judged + cut if slot >= 0 else 0):
            j, right = min(position, POSITIONS - 1), 1.0 if position < accepted[r] else 0.0
            target, believed = _pulled(s, j, before)
            before, z = believed, believed + offset
            p, own, half = _sigmoid(believed), _sigmoid(z), _sigmoid(believed + 0.5 * offset)
            if position == judged:
                right = _sigmoid(s.head[0] * z + s.head[1] * signal[first + position] + s.head[2])
            recent = min(max(own + s.drift[1], _EDGE), 1.0 - _EDGE)
            s.drift[0] += right * np.log(recent / own) + (1.0 - right) * np.log((1.0 - recent) / (1.0 - own))
            s.drift[1] += (right - own - s.drift[1]) / _RECENT
            if s.drift[0] > surprise:
                s.information[:] *= np.exp(surprise - s.drift[0])
                s.tied[0] = max(_LEAST_WEIGHT, s.tied[0] * np.exp(surprise - s.drift[0]))  # nor does the prior hold
            s.drift[0] = min(max(s.drift[0], 0.0), surprise)
            # What is special about a request may turn out to hold for all: half of it is left to be explained.
            s.information[j] = s.information[j] * (1.0 - 1.0 / memory) + max(half * (1.0 - half), _LEAST_WEIGHT)
            believed += (right - half) / (s.information[j] + s.tied[j])
            bias = believed + (believed - target) * s.tied[j] / s.information[j]
            s.bias[j] = min(max(bias, -_FARTHEST), _FARTHEST)
            s.counts[slot] += np.array([right, 1.0 - right, p, 1.0 - p])
            if has_signal and position < judged:
                _learn_head(s, z, signal[first + position], right, 4.0 * memory)
        first += drafted[r]


@njit(cache=True, nogil=True)
def _biases(s: _State, hope: float) -> Floats:
    out, before = np.empty(POSITIONS), 0.0
    for j in range(POSITIONS):
        before = _pulled(s, j, before)[1]
        out[j] = before + hope / np.sqrt(s.information[j] + s.tied[j])
    return out


@njit(cache=True, nogil=True)
def _planned(biases: Floats, offsets: Floats, head: Floats, cap: Ints, signal: Floats, longest: int) -> Floats:
    survival = np.zeros((cap.size, longest))
    for r in range(cap.size):
        reach = 1.0
        for j in range(min(cap[r], longest)):
            z = biases[min(j, POSITIONS - 1)] + offsets[r]
            if signal.size:
                z = head[0] * z + head[1] * signal[r, j] + head[2]
            reach *= _sigmoid(z)
            survival[r, j] = reach
    return survival


@njit(cache=True, nogil=True)
def _shown(biases: Floats, offsets: Floats, head: Floats, signal: Floats, bonus: Floats, lens: Ints) -> Floats:
    out, n = np.empty(signal.size), 0
    for r in range(lens.size):
        reach = 1.0
        for j in range(lens[r]):
            z = head[0] * (biases[min(j, POSITIONS - 1)] + offsets[r]) + head[2]
            out[n] = reach * _sigmoid(z + head[1] * (signal[n] - bonus[n]))
            reach *= _sigmoid(z + head[1] * signal[n])
            n += 1
    return out


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
        settings: AcceptanceSettings | None = None,
        *,
        rates: Sequence[float] = (),
        signal: bool = True,
        weights: tuple[float, float, float] = (0.0, 1.0, 0.0),
        variances: tuple[float, float, float] = (0.25, 0.25, 1.0),
    ) -> None:
        self.settings = settings or AcceptanceSettings()
        self._has_signal = signal
        known = [logit(chance) for chance in conditional(rates)[:POSITIONS]] or [logit(self.settings.prior)]
        prior = np.array(known + known[-1:] * (POSITIONS - len(known)))
        tied = np.full(POSITIONS, self.settings.neighbour_information)
        tied[0] = self.settings.prior_information
        self._state = _State(
            bias=prior.copy(),
            information=np.zeros(POSITIONS),
            prior=prior,
            tied=4.0 * tied if rates else tied,  # a profile counts for more than a guess
            head=np.array(weights if signal else (1.0, 0.0, 0.0)),
            variance=np.diag(np.array(variances)),
            most=np.array(variances),
            counts=np.zeros((0, 4)),
            drift=np.zeros(2),
        )

    @classmethod
    def of_lookup(cls, settings: AcceptanceSettings, rates: Sequence[float]) -> AcceptanceModel:
        """Of a proposer whose signal is the length of its match. That longer ones are right more often holds for any
        text: were that open, a single long one that was wrong would end lookups for good."""
        settings = replace(settings, prior=0.56)  # of a first slot found by a match of two tokens
        return cls(settings, rates=rates, weights=(1.0, 0.8, 0.0), variances=(0.01, 0.02, 1.0))

    @property
    def head(self) -> Floats:
        """γ, w, d."""
        return self._state.head

    def grow(self, slots: int) -> None:
        """Makes room for requests."""
        more = slots - len(self._state.counts)
        if more > 0:
            self._state = self._state._replace(counts=np.vstack([self._state.counts, np.zeros((more, 4))]))

    def admit(self, slot: int, expected: float | None) -> None:
        """A new request takes a slot; ``expected`` is the acceptance that its caller expects, or None."""
        self._state.counts[slot] = 0.0
        if expected is not None:
            usual, outcomes = self.chance(0), 4.0 * self.settings.request_shrinkage
            self._state.counts[slot] = outcomes * np.array([expected, 1.0 - expected, usual, 1.0 - usual])

    def pass_steps(self, steps: int) -> None:
        """So many steps have passed: what was seen of single requests grows old."""
        self._state.counts[:] *= np.exp(-steps / self.settings.request_memory)

    def observe(self, slots: Ints, drafted: Ints, tested: Ints, accepted: Ints, signal: Floats) -> None:
        """Learns from verified drafts.

        Args:
            slots: [B] of the requests; −1: nothing is to be learnt from this one.
            drafted: [B] tokens.
            tested: [B] tokens with a verdict: the accepted ones, and the first rejected one.
            accepted: [B]
            signal: [Σ drafted] of all drafted tokens, one request after the other.
        """
        on = self.settings
        columns = (slots, drafted, tested, accepted, signal, self._has_signal)
        _observe(self._state, *columns, on.memory, on.surprise, on.request_shrinkage)

    def biases(self, hope: float = 0.0) -> Floats:
        """[POSITIONS] z of a request like the average; ``hope``: standard deviations by which it may be better."""
        return np.asarray(_biases(self._state, hope))

    def offsets(self, slots: Ints) -> Floats:
        """[B] by which z of these requests differs."""
        return np.asarray(_offsets(self._state.counts, slots, self.settings.request_shrinkage))

    def planned_survival(
        self, slots: Ints, cap: Ints, longest: int, signal: Floats | None = None, *, hope: float = 0.0
    ) -> Floats:
        """[B, longest] Chance that a slot and all before it are accepted, before anything is drafted; 0 beyond the cap.

        Args:
            slots, cap: [B] cap: longest drafts.
            signal: [B, longest] of a proposer that offers before it drafts.
            hope: see ``biases``.
        """
        known = np.zeros((0, 0)) if signal is None else signal
        return np.asarray(_planned(self.biases(hope), self.offsets(slots), self.head, cap, known, longest))

    def shown_survival(self, slots: Ints, signal: Floats, bonus: Floats, lens: Ints) -> Floats:
        """[N] The same of drafted tokens, as far as was known before each was drawn.

        Args:
            slots, lens: [b]
            signal: [N] of all drafted tokens, one request after the other.
            bonus: [N] the part of it that hangs on which token was drawn; it counts for the tokens behind only.
        """
        return np.asarray(_shown(self.biases(), self.offsets(slots), self.head, signal, bonus, lens))

    def chance(self, position: int) -> float:
        """Conditional acceptance of a slot, of a request like the average."""
        return float(_sigmoid(self.biases()[min(position, POSITIONS - 1)]))

    def rates(self, positions: int) -> tuple[float, ...]:
        """Unconditional acceptance per position, non-increasing."""
        return tuple(np.cumprod([self.chance(j) for j in range(positions)]).tolist())

    def document(self) -> dict[str, object]:
        """What is believed, as plain JSON values."""
        gamma, weight, shift = self.head.tolist()
        biases = (gamma * self.biases() + shift).tolist()
        return {
            "acceptance": [round(self.chance(j), 4) for j in range(POSITIONS)],
            "signal": {"weight": weight, "bias": biases},
        }


class RequestSlots:
    """Rows of running requests in acceptance models; those of ended ones are handed out again."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._free: list[int] = []
        self.size = 0

    def take(self, ids: Sequence[str]) -> tuple[Ints, list[int]]:
        """Slots of ``ids``, and the indices in it of requests that are new."""
        of, new = self._of, [i for i, request in enumerate(ids) if request not in self._of]
        for i in new:
            if not self._free:
                self._free.append(self.size)
                self.size += 1
            of[ids[i]] = self._free.pop()
        return np.array([of[request] for request in ids], dtype=np.int64), new

    def find(self, ids: Sequence[str]) -> Ints:
        """Slots of ``ids``; −1 for those that have ended."""
        return np.array([self._of.get(request, -1) for request in ids], dtype=np.int64)

    def release(self, ids: Sequence[str]) -> None:
        """These requests have ended."""
        self._free.extend(self._of.pop(request) for request in ids if request in self._of)
