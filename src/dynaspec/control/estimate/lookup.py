"""Chance that a looked-up token is right if all before it are: ``σ(d + w · s + u[request])``, s being log₂ of half the
tokens that agree. Formulas: ``docs/auto.md``.

The tokens before it agree too, so a token's place in a draft is nothing beside the length of the match. What is special
about a request is what its matches do not explain: a text of which a part repeats itself has short matches that are
wrong, and long ones that are right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .acceptance import LEAST_WEIGHT, POSITIONS, request_offset, seated, sigmoid
from .settings import AutoSettings

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FIRST_CHANCE, _DOUBLING = 0.56, 0.8
"""Before anything is known: the chance of a token that two tokens' match offers, and what twice the match adds to z."""
_VARIANCE = (1.0, 0.02)
"""Of d and w, at most. That longer matches are right more often holds for any text: were that open, a single long one
that was wrong would end lookups for good."""


@njit(cache=True, nogil=True)
def _signal(match: int, position: int) -> float:
    return float(np.log2(0.5 * (max(match, 1) + position)))


@njit(cache=True, nogil=True)
def _observe(
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
        offset = request_offset(counts, slots[r], shrinkage)
        for j in range(tested[r] if slots[r] >= 0 else 0):
            s, outcome = _signal(match[r], j), 1.0 if j < right[r] else 0.0
            z = line[0] + line[1] * s
            usual, p = sigmoid(z), sigmoid(z + 0.5 * offset)  # half of what is special may turn out to hold for all
            weight = max(p * (1.0 - p), LEAST_WEIGHT)
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
def _survival(
    line: Floats, counts: Floats, shrinkage: float, slots: Ints, match: Ints, lens: Ints, longest: int
) -> Floats:
    out = np.zeros((lens.size, longest))
    for r in range(lens.size):
        reach, offset = 1.0, request_offset(counts, slots[r], shrinkage)
        for j in range(lens[r]):
            reach *= sigmoid(line[0] + line[1] * _signal(match[r], j) + offset)
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
        self._counts = seated(self._counts, slot, expected, _FIRST_CHANCE, outcomes)

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
        _observe(self._line, self._variance, self._most, self._counts, runs, *numbers)

    def survival(self, slots: Ints, match: Ints, lens: Ints, longest: int) -> Floats:
        """[B, longest] Chance that a token and all before it are right; 0 behind a draft's end.

        Args:
            slots, match, lens: [B] of requests, or −1; of their matches and drafts.
        """
        shrinkage = self._settings.request_shrinkage
        return np.asarray(_survival(self._line, self._counts, shrinkage, slots, match, lens, longest))

    def document(self) -> dict[str, object]:
        """What is believed, as plain JSON values: of drafts that a match of two tokens offers."""
        shift, weight = self._line.tolist()
        chances = [round(float(sigmoid(shift + weight * _signal(2, j))), 4) for j in range(POSITIONS)]
        return {"acceptance": chances, "signal": {"weight": weight, "bias": [shift] * POSITIONS}}
