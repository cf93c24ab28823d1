"""Metric families as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from .families import Family, HistogramFamily, NumberFamily, S, bound_text


class FamilyCollector(Collector, Generic[S]):
    """The families of one source, read off it anew for each collection.

    Args:
        namespace: comes before every name, with a colon.
        labels: go with every sample.
    """

    def __init__(self, families: Sequence[Family[S]], source: S, *, namespace: str, labels: Mapping[str, str]) -> None:
        self._families = families
        self._source = source
        self._namespace = namespace
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            name = f"{self._namespace}:{family.name}"
            yield self._histogram(name, family) if isinstance(family, HistogramFamily) else self._numbers(name, family)

    def _histogram(self, name: str, family: HistogramFamily[S]) -> Metric:
        value = family.value(self._source)
        metric = HistogramMetricFamily(name, family.meaning, labels=tuple(self._labels))
        buckets = [(bound_text(bound), count) for bound, count in value.cumulative()]
        metric.add_metric(tuple(self._labels.values()), buckets, value.total)
        return metric

    def _numbers(self, name: str, family: NumberFamily[S]) -> Metric:
        labels = (*self._labels, *family.labels)
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        metric: CounterMetricFamily | GaugeMetricFamily = kind(name, family.meaning, labels=labels)
        for values, number in family.values(self._source):
            metric.add_metric((*self._labels.values(), *values), number)
        return metric


def render(collectors: Sequence[Collector], accept: str) -> tuple[bytes, str]:
    """A scrape's answer and its content type: Prometheus' text format, or OpenMetrics where that is asked for.

    Args:
        accept: the Accept header; of the two formats, the one named first counts.
    """
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    kinds = [part.partition(";")[0].strip() for part in accept.split(",")]
    known = [kind for kind in kinds if kind in ("application/openmetrics-text", "text/plain")]
    if known[:1] == ["application/openmetrics-text"]:
        # Every name is one that needs no escaping; asked to escape, the library takes the colon for a fault.
        body: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]  # has no annotations
            registry, escaping=openmetrics.ALLOWUTF8
        )
        return body, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
