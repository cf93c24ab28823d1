"""Which tokens a request has seen, and how often it produced them: what penalties depend on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .rng import Int64


class TokenCounts:
    """Distinct tokens of one request, in the order of their first appearance.

    Sparse, because a request sees far fewer distinct tokens than a vocabulary holds.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._slot: dict[int, int] = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self._tokens = np.fromiter(self._slot, np.int64, len(self._slot))
        self._counts = np.zeros(len(self._slot), np.float32)

    def add(self, tokens: Sequence[int]) -> None:
        """Counts output tokens that became final."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._slot]
        if new:
            self._slot.update(zip(new, range(len(self._slot), len(self._slot) + len(new)), strict=True))
            self._tokens = np.append(self._tokens, np.asarray(new, np.int64))
            self._counts = np.append(self._counts, np.zeros(len(new), np.float32))
        for token in tokens:
            self._counts[self._slot[token]] += 1

    def after(self, drafted: Sequence[int]) -> tuple[Int64, npt.NDArray[np.float32]]:
        """(distinct tokens [N], occurrences of each in the output [N]) once ``drafted`` follow the output."""
        if not drafted:
            return self._tokens, self._counts
        counts = self._counts.copy()
        new: dict[int, int] = {}
        for token in drafted:
            slot = self._slot.get(token)
            if slot is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[slot] += 1
        if not new:
            return self._tokens, counts
        tokens = np.append(self._tokens, np.fromiter(new, np.int64, len(new)))
        return tokens, np.append(counts, np.fromiter(new.values(), np.float32, len(new)))
