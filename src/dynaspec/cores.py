"""How many cores this process may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use at once, at least 1.

    Args:
        root: where control groups are mounted.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _quota(root)
    return cores if quota is None else max(1, min(cores, round(quota)))


def _quota(root: Path) -> float | None:
    """Cores' worth of time that the control group has, of either version; None = no limit."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        cores = float(limit) / float(period)
    except ValueError:  # "max"
        return None
    return cores if cores > 0.0 else None
