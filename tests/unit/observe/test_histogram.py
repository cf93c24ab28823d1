from __future__ import annotations

import math

import numpy as np
import pytest

from dynaspec.observe import counts as observe_counts
from dynaspec.observe.counts import Histogram, HistogramCounts

BOUNDS = (1.0, 2.0, 5.0)


def counted(*values: float, bounds: tuple[float, ...] = BOUNDS) -> HistogramCounts:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    return histogram.snapshot()


def test_a_bound_belongs_to_its_own_bucket() -> None:
    assert counted(0.0, 1.0, 1.5, 2.0, 5.0, 5.1, 99.0).counts == (2, 2, 1, 2)


def test_cumulative_counts_end_with_all_values() -> None:
    assert list(counted(0.5, 1.5, 7.0).cumulative()) == [(1.0, 1), (2.0, 2), (5.0, 2), (math.inf, 3)]


def test_total_and_mean() -> None:
    counts = counted(0.5, 1.5, 7.0)
    assert (counts.count, counts.total, counts.mean) == (3, 9.0, 3.0)
    assert counted().mean is None


def test_what_came_between_two_snapshots() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.5)
    before = histogram.snapshot()
    histogram.observe(3.0)
    histogram.observe(9.0)
    assert histogram.snapshot() - before == HistogramCounts(BOUNDS, (0, 0, 1, 1), 12.0)
    assert before.counts == (1, 0, 0, 0), "a snapshot does not change"


def test_quantiles_are_interpolated_within_a_bucket() -> None:
    counts = counted(*[1.5] * 10)
    assert counts.quantile(0.5) == pytest.approx(1.5)
    assert counts.quantile(0.0) == 1.0
    assert counts.quantile(1.0) == 2.0


def test_quantiles_are_within_a_bucket_of_the_truth() -> None:
    values = np.random.default_rng(0).gamma(2.0, 0.02, 2000)
    counts = counted(*values.tolist(), bounds=observe_counts.WAIT_S)
    for q in (0.05, 0.5, 0.95, 0.99):
        true, found = float(np.quantile(values, q)), counts.quantile(q)
        assert found is not None
        edges = [0.0, *observe_counts.WAIT_S]
        i = int(np.searchsorted(edges, true))
        assert edges[max(0, i - 2)] <= found <= edges[i + 1]


def test_quantiles_beyond_the_bounds_and_of_nothing() -> None:
    assert counted(100.0, 200.0).quantile(0.5) == 5.0
    assert counted().quantile(0.5) is None


@pytest.mark.parametrize("name", ["STEP_S", "WAIT_S", "TOKENS", "ROWS", "DRAFT_TOKENS"])
def test_bounds_ascend(name: str) -> None:
    bounds = getattr(observe_counts, name)
    assert list(bounds) == sorted(set(bounds))
