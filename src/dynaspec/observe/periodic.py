"""A log line about speculation every few seconds."""

from __future__ import annotations

import logging

from .format import log_line
from .stats import SpecStats

logger = logging.getLogger(__name__)


class PeriodicLog:
    """Logs what happened since the previous line, at most once every ``interval_s`` seconds.

    It has no clock: the caller says what time it is. Spans without a decoding step are passed over.
    """

    def __init__(self, stats: SpecStats, interval_s: float = 10.0) -> None:
        self._stats = stats
        self._interval_s = interval_s
        self._since: float | None = None
        self._before = stats.snapshot()

    def tick(self, now: float) -> bool:
        """Logs if a line is due.

        Args:
            now: monotonic seconds; the first call starts the first span.

        Returns:
            Whether a line was logged.
        """
        if self._since is None:
            self._since = now
            return False
        elapsed = now - self._since
        if elapsed < self._interval_s:
            return False
        counts = self._stats.snapshot()
        span = counts - self._before
        self._since, self._before = now, counts
        if span.request_steps == 0:
            return False
        logger.info("Speculation: %s", log_line(span, elapsed))
        return True
