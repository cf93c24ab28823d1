"""Counting values into fixed buckets, cheaply enough to do it for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate


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
