"""Metrics as Python objects. Classes, names and meaning are those of vLLM's ``LLM.get_metrics``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .family import Family, HistogramFamily, S

_TOTAL = "_total"
"""Ends the names of counters where Prometheus reads them, but not here."""
_POSITION = "position"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric with one set of labels."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """Only grows; whole numbers but for those of seconds."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """Goes up and down."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """A counter for each position of a draft."""

    values: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """How values are distributed."""

    count: int
    sum: float
    buckets: Mapping[str, int]
    """Upper bound → values up to it; ``+Inf`` has all."""


def readings(
    families: Sequence[Family[S]], source: S, *, namespace: str, labels: Mapping[str, str]
) -> Iterator[Metric]:
    """What the families say of a source now.

    Args:
        namespace: comes before every name, with a colon.
        labels: go with every metric.
    """
    for family in families:
        name = f"{namespace}:{family.name}"
        if isinstance(family, HistogramFamily):
            value = family.value(source)
            buckets = {_bound(bound): count for bound, count in value.cumulative()}
            yield Histogram(name=name, labels=labels, count=value.count, sum=value.total, buckets=buckets)
            continue
        counts, name = family.kind == "counter", name.removesuffix(_TOTAL)
        if family.labels == (_POSITION,):
            yield Vector(name=name, labels=labels, values=[int(number) for _, number in family.values(source)])
            continue
        for own, number in family.values(source):
            told = {**labels, **dict(zip(family.labels, own, strict=True))}
            yield (
                Counter(name=name, labels=told, value=number) if counts else Gauge(name=name, labels=told, value=number)
            )


def _bound(value: float) -> str:
    return "+Inf" if value == math.inf else str(float(value))
