"""The requests of a simulated engine: queue, prefill, decoding columns."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from .arrivals import Arrivals
from .load import Chunk
from .traces import Floats, Ints, Trace

_FEW_ROWS = 16
"""Prefill gets at least so many rows where decoding leaves them, however long drafts are."""


class Queue:
    """Requests that have not been admitted, in the order of arrival."""

    def __init__(self, trace: Trace, arrivals: Arrivals) -> None:
        self.arrival_s: Floats = np.full(len(trace), np.nan)
        self._think_s = arrivals.think_s
        self._unborn = deque(range(len(arrivals.times), len(trace)))
        self._coming: deque[tuple[float, int]] = deque(zip(arrivals.times.tolist(), range(len(trace)), strict=False))
        self._waiting: deque[int] = deque()
        self.arrival_s[: len(arrivals.times)] = arrivals.times

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next_arrival(self) -> float | None:
        """When the next request arrives; None if none is on its way."""
        return self._coming[0][0] if self._coming else None

    def arrive(self, now: float) -> None:
        """Whoever has arrived by now waits."""
        while self._coming and self._coming[0][0] <= now:
            self._waiting.append(self._coming.popleft()[1])

    def ended(self, count: int, now: float) -> None:
        """In a closed loop, each end sets off an arrival."""
        for _ in range(min(count, len(self._unborn))):
            request = self._unborn.popleft()
            self.arrival_s[request] = now + self._think_s
            self._coming.append((now + self._think_s, request))

    def peek(self) -> int | None:
        return self._waiting[0] if self._waiting else None

    def pop(self) -> int:
        return self._waiting.popleft()


@dataclass(slots=True)
class Decoding:
    """Columns of the requests that decode."""

    request: Ints
    """[B] indices into the trace."""
    position: Ints
    """[B] output tokens they have."""
    lag: Ints
    """[B] committed tokens, but the last, that the drafter has not seen."""
    ids: tuple[str, ...] = ()

    @classmethod
    def empty(cls) -> Decoding:
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none.copy(), none.copy())

    def __len__(self) -> int:
        return len(self.request)

    def keep(self, where: Ints) -> None:
        self.request, self.position, self.lag = self.request[where], self.position[where], self.lag[where]
        self.ids = tuple([self.ids[i] for i in where.tolist()])

    def add(self, requests: list[int], lag: Ints, names: list[str]) -> None:
        """Requests that have just got their first token."""
        self.request = np.concatenate([self.request, np.array(requests, dtype=np.int64)])
        self.position = np.concatenate([self.position, np.ones(len(requests), dtype=np.int64)])
        self.lag = np.concatenate([self.lag, lag])
        self.ids = (*self.ids, *[names[request] for request in requests])


@dataclass(slots=True)
class _Prompt:
    request: int
    left: int
    done: int = 0


class Prefill:
    """Admission in order of arrival, and prompts computed in chunks beside the decoding requests.

    A request is admitted when there is a seat, and room in the KV memory for all of it to its end: as if admission
    knew lengths beforehand, so that nobody is ever preempted.
    """

    def __init__(self, trace: Trace, seats: int, max_rows: int, kv_tokens: int | None) -> None:
        self._trace = trace
        self._seats = seats
        self._max_rows = max_rows
        self._kv_left = kv_tokens
        self._prompts: list[_Prompt] = []

    def __len__(self) -> int:
        return len(self._prompts)

    def schedule(self, queue: Queue, decoding: int, last_rows: int) -> tuple[list[Chunk], list[int]]:
        """This step's chunks, and the requests whose prompt they complete.

        Args:
            decoding: requests that decode in this step.
            last_rows: target rows that decoding took in the step before, which it may want again.
        """
        left = self._max_rows - decoding
        budget = max(self._max_rows - max(last_rows, decoding), min(left, _FEW_ROWS))
        self._admit(queue, decoding, budget)
        chunks, complete = [], []
        for prompt in self._prompts:
            if budget <= 0:
                break
            count = min(prompt.left, budget)
            chunks.append(Chunk(prompt.done, count))
            prompt.done, prompt.left, budget = prompt.done + count, prompt.left - count, budget - count
            if not prompt.left:
                complete.append(prompt.request)
        if complete:
            self._prompts = [prompt for prompt in self._prompts if prompt.left]
        return chunks, complete

    def release(self, requests: Ints) -> None:
        """These have ended: their KV is free."""
        if self._kv_left is not None:
            self._kv_left += int((self._trace.prompt[requests] + self._trace.output[requests]).sum())

    def _admit(self, queue: Queue, decoding: int, budget: int) -> None:
        pending = sum(prompt.left for prompt in self._prompts)
        while decoding + len(self._prompts) < self._seats and pending < budget:
            request = queue.peek()
            if request is None or not self._try_reserve(request):
                break
            queue.pop()
            length = int(self._trace.prompt[request])
            self._prompts.append(_Prompt(request, length))
            pending += length

    def _try_reserve(self, request: int) -> bool:
        if self._kv_left is None:
            return True
        needed = int(self._trace.prompt[request] + self._trace.output[request])
        if needed > self._kv_left:
            return False
        self._kv_left -= needed
        return True
