"""Log lines about an engine every few seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .format import engine_line, log_line
from .snapshot import EngineSnapshot

logger = logging.getLogger(__name__)


class PeriodicLog:
    """Logs what happened since the previous lines, at most once every ``interval_s`` seconds.

    It has no clock: the caller says what time it is. Spans without a step are passed over.
    """

    def __init__(self, take: Callable[[], EngineSnapshot], interval_s: float = 10.0) -> None:
        """
        Args:
            take: tells what the engine is doing; called when lines are due only.
        """
        self._take = take
        self._interval_s = interval_s
        self._since: float | None = None
        self._before = take()

    def tick(self, now: float) -> bool:
        """Logs if lines are due.

        Args:
            now: monotonic seconds; the first call starts the first span.

        Returns:
            Whether anything was logged.
        """
        if self._since is None:
            self._since = now
            return False
        elapsed = now - self._since
        if elapsed < self._interval_s:
            return False
        before, current = self._before, self._take()
        self._since, self._before = now, current
        counts = current.counts - before.counts
        if counts.steps == 0:
            return False
        logger.info("Engine: %s", engine_line(before, current, elapsed))
        if current.policy != "none" and counts.request_steps:
            logger.info("Speculation: %s", log_line(counts, elapsed))
        return True
