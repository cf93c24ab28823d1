"""Per-request state of running requests, as columns over lanes.

A request keeps its lane from admission until it ends or is preempted. Two lengths are kept apart:

    length      committed tokens; the last of them has been processed by no model yet
    expected    the same if every step in flight commits all it may: what the next step is scheduled by

They are equal whenever no step is in flight; ``commit`` subtracts the surplus of a step that committed less.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.contract.proposer import Ints

from .request import Request


class Lanes:
    """Fixed number of rows; free ones are handed out lowest first."""

    def __init__(self, max_lanes: int, max_tokens: int) -> None:
        self.tokens: npt.NDArray[np.int32] = np.zeros((max_lanes, max_tokens + 1), dtype=np.int32)
        self.length: Ints = np.zeros(max_lanes, dtype=np.int64)
        self.computed: Ints = np.zeros(max_lanes, dtype=np.int64)
        """Tokens whose target KV is valid."""
        self.expected: Ints = np.zeros(max_lanes, dtype=np.int64)
        self.expected_computed: Ints = np.zeros(max_lanes, dtype=np.int64)
        self.max_length: Ints = np.zeros(max_lanes, dtype=np.int64)
        self.branches: Ints = np.zeros(max_lanes, dtype=np.int64)
        """Nodes of a tree in flight beyond its depth: they have KV, too."""
        self.last_draft: Ints = np.zeros(max_lanes, dtype=np.int64)
        """Draft tokens granted last; an estimate of the rows that a lane will take next."""
        self.requests: list[Request | None] = [None] * max_lanes
        self._free = list(range(max_lanes - 1, -1, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def next_free(self) -> int:
        return self._free[-1]

    def open(self, request: Request, computed: int) -> int:
        """Seats a request, ``computed`` of whose tokens are already in the prefix cache."""
        lane = self._free.pop()
        tokens = request.tokens()
        self.tokens[lane, : len(tokens)] = tokens
        self.length[lane] = self.expected[lane] = len(tokens)
        self.computed[lane] = self.expected_computed[lane] = computed
        self.max_length[lane] = request.max_length
        self.branches[lane] = self.last_draft[lane] = 0
        self.requests[lane] = request
        request.lane = lane
        return lane

    def vacate(self, lane: int) -> None:
        """The request leaves. The lane itself is handed out again only after ``reuse``."""
        request = self.requests[lane]
        if request is not None:
            request.lane = None
        self.requests[lane] = None

    def reuse(self, lane: int) -> None:
        """No step in flight reads the lane any more."""
        self._free.append(lane)
        self._free.sort(reverse=True)
