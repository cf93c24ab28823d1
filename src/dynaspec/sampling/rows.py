"""Which request, and which drafted tokens, a row of logits belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Rows:
    """The logits rows of one model pass that are to be sampled from. R rows, B requests, drafts up to K tokens."""

    lanes: Int64
    """[R] lane (persistent table row of a running request) of each logits row."""
    request: Int64
    """[R] index into the first axis of ``drafts``."""
    depth: Int64
    """[R] number of drafted tokens x_1 … x_depth that the row has seen beyond the committed output."""
    drafts: Int64
    """[B, K] drafted tokens, zero-padded."""

    def take(self, index: Int64) -> Rows:
        """Some of the rows, with the same drafts."""
        return Rows(self.lanes[index], self.request[index], self.depth[index], self.drafts)

    def drafted(self, row: int) -> list[int]:
        """x_1 … x_depth of a row."""
        depth = int(self.depth[row])
        return self.drafts[self.request[row], :depth].tolist() if depth else []
