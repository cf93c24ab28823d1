"""Looks at an engine once a second while somebody watches, and remembers the last ten minutes of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from dynaspec.contract.errors import DynaspecError
from dynaspec.observe.snapshot import EngineSnapshot

from .dashboard.points import Moment, Point, point

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Update:
    """What a watcher has not seen yet."""

    points: tuple[Point, ...]
    """In order; the first update of a watcher has all that are remembered."""
    minute: tuple[Moment, ...]
    """The moments of the last minute, in order; the last is now. Empty if the engine has stopped."""
    stopped: str | None = None
    """Why the engine has stopped."""


class LiveFeed:
    """One for an engine, for any number of watchers; belongs to one event loop. It has no task of its own: the first
    watcher to find that the latest look has grown old takes the next one for all.

    Args:
        take: a snapshot of the engine; raises ``DynaspecError`` once it has stopped.
        interval_s: seconds between two looks.
        keep_s: seconds of points that are remembered.
        clock: unix seconds, to stamp what is seen.
    """

    def __init__(
        self,
        take: Callable[[], Awaitable[EngineSnapshot]],
        *,
        interval_s: float = 1.0,
        keep_s: float = 600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._take = take
        self._interval_s = interval_s
        self._clock = clock
        self._looking = asyncio.Lock()
        self._watchers = 0
        self._points: deque[Point] = deque(maxlen=max(1, round(keep_s / interval_s)))
        self._drawn = 0
        """Points made since the start, forgotten ones too."""
        self._minute: deque[Moment] = deque()
        self._stopped: str | None = None
        self._due = 0.0

    async def follow(self) -> AsyncGenerator[Update, None]:
        """What is there, then an update a look. Never ends by itself; whoever leaves closes it."""
        if not self._watchers:
            self._minute.clear()  # nobody knows what happened when since then
            self._due = 0.0
        self._watchers += 1
        seen = max(0, self._drawn - len(self._points))
        try:
            while True:
                await self._look()
                new = self._drawn - seen
                seen = self._drawn
                points = tuple(self._points)[-new:] if new else ()
                yield Update(points, tuple(self._minute), self._stopped)
                await asyncio.sleep(self._due - time.monotonic())
        finally:
            self._watchers -= 1

    async def _look(self) -> None:
        """Takes a snapshot, unless another watcher has just done so."""
        async with self._looking:
            if time.monotonic() < self._due:
                return
            try:
                snapshot = await self._take()
            except DynaspecError as error:
                self._minute.clear()
                self._stopped = str(error)
            else:
                self._remember(Moment(self._clock(), snapshot))
            self._due = time.monotonic() + self._interval_s

    def _remember(self, now: Moment) -> None:
        minute = self._minute
        while minute and now.at - minute[0].at > _MINUTE_S:
            minute.popleft()
        minute.append(now)
        if len(minute) > 1 and now.at > minute[-2].at:
            self._points.append(point(minute))
            self._drawn += 1
