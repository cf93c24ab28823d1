"""How the scheduler's numbers reach the process that serves ``/metrics``: in a file, which the one replaces and the
other reads.

vLLM's own statistics have no field for anybody else's. Scheduler and stat loggers of an engine are built from one
configuration, whose ``instance_id`` names the file; on two machines they do not meet, and there are no such metrics.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.families import CONTROL, SPECULATION, NumberFamily, gauge
from dynaspec.observe.stats import EngineSnapshot, StepMeter

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


NAMESPACE = "dynaspec"
_NOT_HERE = frozenset(
    {"proposer_enabled", "proposer_faults_total", "drafter_kv_skipped_total", "drafter_kv_redone_total"}
)
"""Families about things that vLLM's drafters do not have or do not tell."""

FAMILIES: tuple[NumberFamily[EngineSnapshot], ...] = tuple(
    family for family in (*SPECULATION, *CONTROL) if isinstance(family, NumberFamily) and family.name not in _NOT_HERE
)
"""Those of the embedded engine that a report tells about."""
OWN: tuple[NumberFamily[Report], ...] = (
    gauge("draft_length_chosen", "Draft length of the latest step.", lambda report: report.k),
    gauge(
        "controller_enabled",
        "1 while dynaspec decides; 0 once a fault has handed its decisions back to vLLM.",
        lambda report: float(report.deciding),
    ),
)


class Gauges:
    """The metrics of a process's engines.

    The library's counters and gauges are used, not a collector, as only these are shared where several server processes
    write their metrics to files (``PROMETHEUS_MULTIPROC_DIR``).
    """

    def __init__(self, labels: Sequence[str], registry: CollectorRegistry = REGISTRY) -> None:
        """
        Args:
            labels: names of those that every sample has.

        Raises:
            ValueError: the registry has these metrics already.
        """
        self._labels = tuple(labels)
        self._metrics: dict[str, Counter | Gauge] = {
            **{family.name: self._made(family, registry) for family in FAMILIES},
            **{own.name: self._made(own, registry) for own in OWN},
        }
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}

    def show(self, report: Report, labels: Sequence[str]) -> None:
        """Brings an engine's metrics up to its report.

        Args:
            labels: its values of the labels.
        """
        snapshot = snapshot_of(report)
        for family in FAMILIES:
            self._set(family, family.values(snapshot), tuple(labels))
        for own in OWN:
            self._set(own, own.values(report), tuple(labels))

    def _made(
        self, family: NumberFamily[EngineSnapshot] | NumberFamily[Report], registry: CollectorRegistry
    ) -> Counter | Gauge:
        names = (*self._labels, *family.labels)
        name = f"{NAMESPACE}:{family.name}"
        if family.kind == "counter":
            return Counter(name, family.meaning, names, registry=registry)
        return Gauge(name, family.meaning, names, registry=registry, multiprocess_mode="mostrecent")

    def _set(
        self,
        family: NumberFamily[EngineSnapshot] | NumberFamily[Report],
        values: Sequence[tuple[tuple[str, ...], float]],
        engine: tuple[str, ...],
    ) -> None:
        metric = self._metrics[family.name]
        if not values and not family.labels:
            values = [((), math.nan)]  # nothing to say now, where there may have been before
        for labels, value in values:
            sample = metric.labels(*engine, *labels)
            if isinstance(sample, Gauge):
                sample.set(value)
                continue
            key = family.name, (*engine, *labels)
            sample.inc(max(0.0, value - self._counted.get(key, 0.0)))
            self._counted[key] = value


def snapshot_of(report: Report) -> EngineSnapshot:
    """A report as what the families of the embedded engine are read off."""
    return EngineSnapshot(
        counts=report.counts,
        running=report.running,
        waiting=0,
        kv_blocks=1,
        kv_blocks_used=0,
        policy=report.policy,
        longest_draft=report.longest,
        steps=replace(StepMeter().snapshot(), recent_goodput=report.goodput),
        estimates=report.estimates,
    )
