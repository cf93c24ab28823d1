from __future__ import annotations

import mmap
import os

import pytest

from soak import Load, Sample, growth_mb_per_min, resident_mb


def test_growth_is_the_slope_after_the_warm_up() -> None:
    samples = [Sample(float(s), 900.0 - s if s < 60 else 500.0 + s / 60 * 0.5, Load(0, 0, 0.0)) for s in range(600)]
    assert growth_mb_per_min(samples, 60) == pytest.approx(0.5)
    assert growth_mb_per_min(samples, 0) != pytest.approx(0.5)
    assert growth_mb_per_min(samples, 599) is None


def test_idle_is_when_nothing_is_left() -> None:
    assert Load(0, 0, 0.0).idle
    assert not any(load.idle for load in (Load(1, 0, 0.0), Load(0, 1, 0.0), Load(0, 0, 0.1)))


def test_the_memory_of_a_process() -> None:
    with mmap.mmap(-1, 50_000_000) as held:  # pages of its own, whatever the allocator has at hand
        before = resident_mb(os.getpid())
        held.write(b"x" * len(held))
        assert 40 < resident_mb(os.getpid()) - before < 80
