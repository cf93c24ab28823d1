"""KV-write gating: draft tokens of little confidence leave no KV behind.

A gated token is still processed, and the next one drafted from it, but it gets no slot, so that no later token sees
it. The KV of the tokens after it closes up, behind the last one written, while their positions stay true.

Slots are the host's, so on CUDA it waits for every pass's confidences.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.contract.proposer import Ints

Bools = npt.NDArray[np.bool_]


class WriteGate:
    """Which draft tokens of one propose call keep their KV, and where."""

    def __init__(self, below: float, rows: int) -> None:
        """
        Args:
            below: tokens with less confidence leave none.
            rows: requests that draft.
        """
        self.skipped = 0
        """Tokens without KV so far."""
        self.in_place = np.zeros(rows, dtype=np.int64)
        """[rows] tokens before the first without KV, whose own is where it belongs once they are committed."""
        self._below = np.float32(below)
        self._written = np.zeros(rows, dtype=np.int64)

    def place(self, rows: Ints, done: int, confidence: npt.NDArray[np.float32]) -> tuple[Ints, Bools]:
        """Draft token number ``done`` (1-based) of some of the rows [r], given its confidence [r].

        Returns:
            KV entries [r] of the draft before it; whether its own is kept [r], after those.
        """
        ahead = self._written[rows]
        kept = confidence >= self._below
        self._written[rows] += kept
        self.in_place[rows] += kept & (ahead == done - 1)
        self.skipped += int(kept.size - np.count_nonzero(kept))
        return ahead, kept
