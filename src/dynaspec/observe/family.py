"""Metric families: name, type, labels, meaning, and how values come from what was counted; and histograms.

Buckets have fixed bounds, so that those of several servers can be added up. Counting a value is cheap enough to do it
for every token.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Literal, TypeAlias, TypeVar

STEP_S = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
"""Seconds of a step, and between two outputs of a request."""
WAIT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""Seconds of a part of a request's life, or of all of it."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Tokens of a prompt or an output."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""Requests or tokens of a step."""
DRAFT_TOKENS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64)
"""Tokens of a draft."""
S = TypeVar("S")
Values = Sequence[tuple[tuple[str, ...], float]]
"""Values of a family's labels, and what was counted for them."""


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """How many values fell into each bucket. ``later - earlier`` is what was counted between."""

    bounds: tuple[float, ...]
    """Upper bounds, each inside its own bucket; ascending."""
    counts: tuple[int, ...]
    """One more than bounds: the last counts what lies above all of them."""
    total: float = 0.0
    """Sum of the values."""

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """None without values."""
        count = self.count
        return self.total / count if count else None

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(bound, values up to it), the last bound infinite: a Prometheus histogram's buckets."""
        return zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True)

    def quantile(self, q: float) -> float | None:
        """Interpolated within its bucket, as Prometheus does; the highest bound at most. None without values.

        Args:
            q: 0 … 1.
        """
        rank = q * self.count
        below, low = 0, 0.0
        for high, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return low + (high - low) * (rank - below) / count
            below, low = below + count, high
        return self.bounds[-1] if self.counts[-1] else None

    def __sub__(self, earlier: HistogramCounts) -> HistogramCounts:
        counts = tuple(a - b for a, b in zip(self.counts, earlier.counts, strict=True))
        return HistogramCounts(self.bounds, counts, self.total - earlier.total)


class Histogram:
    """Adds values up; written by one thread.

    Args:
        bounds: upper bounds of the buckets, ascending.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class NumberFamily(Generic[S]):
    """Counters or gauges, read off a source of type ``S``.

    Args:
        name: without namespace; a counter's ends in ``_total``.
        labels: beside those that all families have.
    """

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    labels: tuple[str, ...]
    values: Callable[[S], Values]


@dataclass(frozen=True, slots=True)
class HistogramFamily(Generic[S]):
    """A histogram, read off a source of type ``S``."""

    name: str
    meaning: str
    value: Callable[[S], HistogramCounts]


Family: TypeAlias = NumberFamily[S] | HistogramFamily[S]


def bound_text(bound: float) -> str:
    """A bucket's upper bound as Prometheus writes it."""
    return "+Inf" if bound == math.inf else str(float(bound))


def counter(name: str, meaning: str, value: Callable[[S], float]) -> NumberFamily[S]:
    return NumberFamily(name, "counter", meaning, (), lambda source: [((), value(source))])


def gauge(name: str, meaning: str, value: Callable[[S], float | None]) -> NumberFamily[S]:
    """Says nothing where the value is None."""

    def values(source: S) -> Values:
        found = value(source)
        return [] if found is None else [((), found)]

    return NumberFamily(name, "gauge", meaning, (), values)


def counters(name: str, label: str, meaning: str, values: Callable[[S], Mapping[str, float]]) -> NumberFamily[S]:
    """One for each value of a label."""
    return NumberFamily(name, "counter", meaning, (label,), lambda source: _one_label(values(source)))


def gauges(name: str, label: str, meaning: str, values: Callable[[S], Mapping[str, float]]) -> NumberFamily[S]:
    """One for each value of a label."""
    return NumberFamily(name, "gauge", meaning, (label,), lambda source: _one_label(values(source)))


def _one_label(values: Mapping[str, float]) -> Values:
    return [((key,), value) for key, value in values.items()]
