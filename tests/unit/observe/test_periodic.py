from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from dynaspec.contract.step import StepOutcome
from dynaspec.observe import PeriodicLog, SpecStats

STEP = StepOutcome(
    plan_step=0, ids=("a",), proposer=(0,), requested=(4,), drafted=(4,), verified=(4,), accepted=(3,),
    emitted=(4,), ended=("rejected",), early_exit=(False,), confidence=((),),
)  # fmt: skip


@pytest.fixture
def stats() -> SpecStats:
    return SpecStats()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="dynaspec.observe.periodic"):
        yield caplog


def test_a_line_every_interval_about_that_interval(stats: SpecStats, log: pytest.LogCaptureFixture) -> None:
    periodic = PeriodicLog(stats, interval_s=10.0)
    assert not periodic.tick(100.0)
    stats.record(STEP)
    assert not periodic.tick(109.9)
    assert periodic.tick(112.0)
    assert "Accepted: 3 tokens" in log.text
    assert "Accepted throughput: 0.25 tokens/s" in log.text
    log.clear()
    stats.record(STEP)
    assert not periodic.tick(121.9)
    assert periodic.tick(122.0)
    assert "Accepted: 3 tokens" in log.text
    assert len(log.records) == 1


def test_an_idle_interval_is_passed_over(stats: SpecStats, log: pytest.LogCaptureFixture) -> None:
    periodic = PeriodicLog(stats)
    periodic.tick(0.0)
    assert not periodic.tick(50.0)
    stats.record(STEP)
    assert not periodic.tick(59.0), "the idle time is not part of the next span"
    assert periodic.tick(60.0)
    assert "Accepted throughput: 0.30 tokens/s" in log.text


def test_what_came_before_it_is_not_its_own(stats: SpecStats, log: pytest.LogCaptureFixture) -> None:
    stats.record(STEP)
    periodic = PeriodicLog(stats)
    periodic.tick(0.0)
    assert not periodic.tick(10.0)
    assert not log.records
