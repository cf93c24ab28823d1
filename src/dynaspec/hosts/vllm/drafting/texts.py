"""Which request is which. vLLM gives a drafter of others' making rows of tokens in a changing order, and no names.

So requests are told by what they say: a row whose text goes on from one that was there in the step before is the same
request. Two requests that say the same may be taken for each other, which changes nothing: what a drafter knows of a
request is a function of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import Ints

Int32 = npt.NDArray[np.int32]

_COMPARED = 256
"""Latest tokens that must be the same."""


@dataclass(frozen=True, slots=True)
class MatchedBatch:
    """The requests that a step has brought tokens, in vLLM's order; without those that still read their prompts."""

    rows: Ints
    """[B] places in vLLM's batch."""
    lanes: Ints
    """[B]"""
    before: Ints
    """[B] tokens of each in the step before; 0 = it is new."""
    lengths: Ints
    """[B] tokens now, the last of which no model has processed yet."""
    brought: Ints
    """[B] tokens that the step has brought; fewer than are new where a step before it has passed unseen."""
    gone: tuple[str, ...]
    """Requests of the step before that are not among them: ended, preempted or not scheduled."""
    vacated: tuple[int, ...]
    """Their lanes, which new requests may have taken."""


class Texts:
    """The texts of all lanes. A request keeps its lane from step to step."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.tokens: Int32 = np.zeros((max_requests, max_tokens + 1), dtype=np.int32)
        """[lanes, max tokens]; columns from a text's length on are undefined."""
        self._lengths: Ints = np.zeros(max_requests, dtype=np.int64)
        """[lanes] 0 = the lane is free."""
        self._lane_of_row: Ints = np.full(max_requests, -1, dtype=np.int64)
        self._names = [""] * max_requests
        self._numbers = count()

    def names(self, lanes: Sequence[int]) -> tuple[str, ...]:
        """Names that no two requests share."""
        return tuple([self._names[lane] for lane in lanes])

    def meet(self, sampled: Sequence[Sequence[int]], lengths: npt.NDArray[np.integer], tokens: Int32) -> MatchedBatch:
        """Recognises the rows of a step.

        Args:
            sampled: for each row of vLLM's batch the tokens that the step has brought; none: it still reads its prompt.
            lengths: [≥ rows] tokens of each row, these included.
            tokens: [≥ rows, max tokens] of each row.
        """
        brought = np.array(list(map(len, sampled)), dtype=np.int64)
        rows = np.flatnonzero(brought)
        now = np.asarray(lengths, dtype=np.int64)[rows]
        lanes = recognise(rows, now, tokens, self.tokens, self._lengths, self._lane_of_row)
        vacated = np.setdiff1d(np.flatnonzero(self._lengths), lanes).tolist()
        gone = self.names(vacated)
        before = np.where(lanes >= 0, self._lengths[lanes], 0)
        self._lengths[vacated] = 0
        new = np.flatnonzero(lanes < 0)
        lanes[new] = np.flatnonzero(self._lengths == 0)[: new.size]
        for lane in lanes[new].tolist():
            self._names[lane] = str(next(self._numbers))
        take_over(rows, now, tokens, self.tokens, lanes, before)
        self._lengths[lanes] = now
        self._lane_of_row[:] = -1
        self._lane_of_row[rows] = lanes
        return MatchedBatch(rows, lanes, before, now, brought[rows], gone, tuple(vacated))


@kernel
def recognise(rows: Ints, lengths: Ints, tokens: Int32, texts: Int32, known: Ints, lane_of_row: Ints) -> Ints:
    """[B] the lane whose text each row goes on from; −1 = none, it is new.

    Args:
        rows, lengths: [B] places in ``tokens``, and how many tokens each has.
        texts, known: of all lanes, [lanes, max tokens] and [lanes]; a length of 0 = free.
        lane_of_row: [rows] in the step before.
    """
    lanes = np.full(rows.size, -1, np.int64)
    taken = known == 0
    for moved in (False, True):  # most rows stay where they were; who did not may have any lane that is left
        for i in range(rows.size):
            if lanes[i] >= 0:
                continue
            stayed = lane_of_row[rows[i]]
            first, end = (0, known.size) if moved else (max(stayed, 0), stayed + 1)
            for lane in range(first, end):
                if not taken[lane] and _goes_on(texts[lane], known[lane], tokens[rows[i]], lengths[i]):
                    lanes[i], taken[lane] = lane, True
                    break
    return lanes


@kernel
def _goes_on(text: Int32, length: int, other: Int32, other_length: int) -> bool:
    """Whether ``other`` is ``text`` with at least one token more, as far as its latest tokens tell."""
    same, first = other_length > length, max(0, length - _COMPARED)
    i = length - 1
    while same and i >= first:
        same = text[i] == other[i]
        i -= 1
    return same


@kernel
def take_over(rows: Ints, lengths: Ints, tokens: Int32, texts: Int32, lanes: Ints, before: Ints) -> None:
    """Copies what is new: tokens from ``before`` on."""
    for i in range(rows.size):
        for j in range(before[i], lengths[i]):
            texts[lanes[i], j] = tokens[rows[i], j]
