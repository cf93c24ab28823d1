"""What the engine tells about itself: counters, latencies, metrics and log lines. No torch, no clocks."""

from __future__ import annotations

from .counts import SpecCounts
from .format import PeriodicLog, format_table, log_line
from .stats import SpecStats

__all__ = ["PeriodicLog", "SpecCounts", "SpecStats", "format_table", "log_line"]
