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
        self._tokens, self._counts = self.after(tokens)
        for token in tokens:
            self._slot.setdefault(token, len(self._slot))

    def after(self, drafted: Sequence[int]) -> tuple[Int64, npt.NDArray[np.float32]]:
        """(distinct tokens [N], occurrences of each in the output [N]) once ``drafted`` follow the output."""
        if not drafted:
            return self._tokens, self._counts
        new = [token for token in dict.fromkeys(drafted) if token not in self._slot]
        tokens = np.concatenate((self._tokens, np.array(new, np.int64))) if new else self._tokens
        counts = np.concatenate((self._counts, np.zeros(len(new), np.float32)))
        for token in drafted:
            slot = self._slot.get(token)
            counts[len(self._slot) + new.index(token) if slot is None else slot] += 1
        return tokens, counts
