"""How many cores this process may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use at once, at least 1.

    Args:
        root: where control groups are mounted.
        own: the file that names this process's groups.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quotas = [round(quota) for folder in _groups(root, own) if (quota := _quota(folder)) is not None]
    return max(1, min([cores, *quotas]))


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Folders of the control groups that may limit this process's time: its own and those around it.

    In a container its group is where they are mounted, whatever ``own`` says.
    """
    versions = {"": root, "cpu": root / "cpu"}  # 2 and 1, by the name of the controller
    places = [("", "/"), ("cpu", "/")]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        places += [(name, place) for name in controllers.split(",") if name in versions]
    for name, place in places:
        group = versions[name] / place.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(versions[name]))


def _quota(group: Path) -> float | None:
    """Cores' worth of time that a control group has, of either version; None = no limit."""
    try:
        if (group / "cpu.max").exists():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = float(limit) / float(period)
    except (OSError, ValueError):  # there is none, or "max"
        return None
    return cores if cores > 0.0 else None
