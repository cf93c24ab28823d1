"""How many generation requests the server takes in, and what it tells those that it does not."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dynaspec.observe.family import Family, counter, gauge

from .errors import bad_request, overloaded, shutting_down

_REMEMBERED = 256
"""Completions that the rate is estimated from."""
_HORIZON_S = 60.0
"""Older completions say nothing of the present rate."""
_RETRY_AFTER_S = (1, 60)
_UNKNOWN_S = 5
"""What a refused caller is told to wait where nothing has been completed of late."""


class Admission:
    """Counts the continuations in the server, and refuses more than it can run or queue.

    Not thread-safe: it belongs to the event loop.

    Args:
        running: continuations that the engine runs at once.
        queued: continuations that may wait for them.
        clock: monotonic seconds.
    """

    def __init__(self, running: int, queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = running + queued
        self._clock = clock
        self.active = 0
        """Continuations that have been admitted and have not ended."""
        self.rejected = 0
        """Requests refused because the server was full."""
        self.draining = False
        """No more requests are taken."""
        self._completed: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        """When, and how many continuations."""

    @asynccontextmanager
    async def slot(self, weight: int = 1) -> AsyncIterator[None]:
        """Room for a request, from its arrival to the end of its answer.

        Args:
            weight: continuations it asks for: prompts times ``n``.

        Raises:
            ApiError: 503, full or shutting down; 400, more than the server ever takes.
        """
        self._admit(weight)
        try:
            yield
        finally:
            self.active -= weight
            self._completed.append((self._clock(), weight))

    def drain(self) -> None:
        """Refuses all requests from now on."""
        self.draining = True

    def _admit(self, weight: int) -> None:
        if self.draining:
            raise shutting_down()
        if weight > self._limit:
            raise bad_request(
                f"the request asks for {weight} continuations (prompts times n), but the server takes {self._limit} "
                "at once; expected fewer"
            )
        excess = self.active + weight - self._limit
        if excess > 0:
            self.rejected += 1
            raise overloaded(self._retry_after(excess))
        self.active += weight

    def _retry_after(self, excess: int) -> int:
        """Seconds until ``excess`` more continuations will have ended, at the rate of late."""
        now = self._clock()
        recent = [(at, weight) for at, weight in self._completed if now - at <= _HORIZON_S]
        if not recent:
            return _UNKNOWN_S
        per_second = sum(weight for _, weight in recent) / max(now - recent[0][0], 1.0)
        low, high = _RETRY_AFTER_S
        return min(max(math.ceil(excess / per_second), low), high)


ADMISSION_FAMILIES: tuple[Family[Admission], ...] = (
    counter("http_requests_rejected_total", "Requests refused because the queue was full.", lambda a: a.rejected),
    gauge("num_requests_admitted", "Continuations let in that have not ended, running or waiting.", lambda a: a.active),
)
