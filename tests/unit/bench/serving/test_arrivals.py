from __future__ import annotations

import math

import numpy as np
import pytest

from dynaspec.bench.serving.arrivals import arrival_times


def gaps(burstiness, seed=0, count=4000):
    times = arrival_times(count, 50.0, burstiness, seed)
    return np.diff([0.0, *times])


def test_all_at_once():
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_at_even_distances():
    assert arrival_times(4, 2.0, math.inf, 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma(burstiness):
    """Its coefficient of variation is 1/√shape, and the rate is met exactly."""
    found = gaps(burstiness)
    assert found.sum() == pytest.approx(80.0)
    assert (found >= 0).all()
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_seeds():
    assert arrival_times(5, 1.0, 1.0, 3) == arrival_times(5, 1.0, 1.0, 3)
    assert arrival_times(5, 1.0, 1.0, 3) != arrival_times(5, 1.0, 1.0, 4)
