"""A scheduler's reports as Prometheus metrics, in the process that serves them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from dynaspec.observe.families import CONTROL, SPECULATION
from dynaspec.observe.family import NumberFamily, gauge
from dynaspec.observe.meters import StepMeter
from dynaspec.observe.snapshot import EngineSnapshot

from .report import Report

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
