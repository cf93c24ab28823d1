"""How the scheduler's numbers reach the process that serves ``/metrics``: in a file, which the one replaces and the
other reads.

vLLM's own statistics have no field for anybody else's. Scheduler and stat loggers of an engine are built from one
configuration, whose ``instance_id`` names the file; on two machines they do not meet, and there are no such metrics.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dynaspec.observe.counts import SpecCounts

_ESTIMATES = ("mode", "expected_tokens", "expected_step_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the scheduler has counted since it was built, and what it does now."""

    policy: str
    longest: int
    """Most tokens that may be drafted at once."""
    k: int
    """Draft length of the latest step."""
    deciding: bool
    """False: a fault has handed all decisions back to vLLM."""
    running: int
    """Requests."""
    goodput: float | None
    """Tokens a second of the latest steps."""
    estimates: Mapping[str, Any] = field(default_factory=dict)
    """The controller's, as far as metrics show them."""
    counts: SpecCounts = field(default_factory=SpecCounts)


def shown(estimates: Mapping[str, Any]) -> dict[str, Any]:
    """The estimates that metrics show."""
    return {name: estimates[name] for name in _ESTIMATES if name in estimates}


class ReportFile:
    """The latest report of one engine. A reader sees all of one report or of the next, never parts of both."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: in a folder that nobody else may write to.
        """
        self._path = path
        self._read: tuple[int, int] | None = None
        """Inode and time of the report that was read last."""

    @classmethod
    def of_engine(cls, vllm_config: Any, rank: int) -> ReportFile:
        """For vLLM's configuration, in the engine's process or in the server's.

        Args:
            rank: of the engine among those of data parallelism, which vLLM adds to its copy of the name.
        """
        name = str(vllm_config.instance_id).removesuffix(f"_dp{rank}")
        return cls(Path(tempfile.gettempdir()) / f"dynaspec-{os.getuid()}" / f"{name}-{rank}.json")

    def write(self, report: Report) -> None:
        """
        Raises:
            OSError: there is no room, or the folder is another user's.
        """
        folder = self._path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user; expected a folder of one's own for reports")
        fresh = self._path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(report), separators=(",", ":")), "utf-8")
        fresh.replace(self._path)

    def read(self) -> Report | None:
        """The latest report; None if it has been read before, or there is none."""
        try:
            found = self._path.stat()
            if found.st_uid != os.getuid() or self._read == (found.st_ino, found.st_mtime_ns):
                return None
            values = json.loads(self._path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        self._read = found.st_ino, found.st_mtime_ns
        counts: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values["counts"].items()
        }
        return Report(**{**values, "counts": SpecCounts(**counts)})

    def remove(self) -> None:
        """The engine has ended."""
        self._path.unlink(missing_ok=True)
