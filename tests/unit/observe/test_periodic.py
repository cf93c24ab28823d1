from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.format import PeriodicLog
from dynaspec.observe.stats import EngineSnapshot
from unit.observe.snapshots import snapshot

STEP = SpecCounts(
    steps=1, request_steps=1, target_passes=1, drafts=1, draft_tokens=4, verified=4, accepted=3, emitted=4,
    draft_emitted=4, drafted_per_pos=(1, 1, 1, 1), accepted_per_pos=(1, 1, 1), step_s=0.1,
)  # fmt: skip
PREFILL = SpecCounts(steps=1, target_passes=1, prefill_rows=640, step_s=0.1)


class FakeEngine:
    """Its counts grow as the test says."""

    def __init__(self) -> None:
        self.now = snapshot(counts=SpecCounts())
        self.looks = 0

    def take(self) -> EngineSnapshot:
        self.looks += 1
        return self.now

    def does(self, counts: SpecCounts) -> None:
        self.now = replace(self.now, counts=self.now.counts + counts)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="dynaspec.observe.format"):
        yield caplog


def test_lines_every_interval_about_that_interval(engine: FakeEngine, log: pytest.LogCaptureFixture) -> None:
    periodic = PeriodicLog(engine.take, interval_s=10.0)
    assert not periodic.tick(100.0)
    engine.does(STEP)
    assert not periodic.tick(109.9)
    assert periodic.tick(112.0)
    assert "Accepted: 3 tokens" in log.text
    assert "Accepted throughput: 0.25 tokens/s" in log.text
    log.clear()
    engine.does(STEP)
    assert not periodic.tick(121.9)
    assert periodic.tick(122.0)
    assert "Accepted: 3 tokens" in log.text
    assert [record.message.split(":")[0] for record in log.records] == ["Engine", "Speculation"]


def test_nobody_looks_before_a_line_is_due(engine: FakeEngine) -> None:
    periodic = PeriodicLog(engine.take)
    for now in range(10):
        periodic.tick(float(now))
    assert engine.looks == 1
    periodic.tick(10.0)
    assert engine.looks == 2


def test_an_idle_interval_is_passed_over(engine: FakeEngine, log: pytest.LogCaptureFixture) -> None:
    periodic = PeriodicLog(engine.take)
    periodic.tick(0.0)
    assert not periodic.tick(50.0)
    engine.does(STEP)
    assert not periodic.tick(59.0), "the idle time is not part of the next span"
    assert periodic.tick(60.0)
    assert "Accepted throughput: 0.30 tokens/s" in log.text


def test_what_came_before_it_is_not_its_own(engine: FakeEngine, log: pytest.LogCaptureFixture) -> None:
    engine.does(STEP)
    periodic = PeriodicLog(engine.take)
    periodic.tick(0.0)
    assert not periodic.tick(10.0)
    assert not log.records


def test_prefill_alone_says_nothing_of_speculation(engine: FakeEngine, log: pytest.LogCaptureFixture) -> None:
    periodic = PeriodicLog(engine.take)
    periodic.tick(0.0)
    engine.does(PREFILL)
    assert periodic.tick(10.0)
    [record] = log.records
    assert "Avg prompt throughput: 64.00 tokens/s" in record.message


def test_plain_decoding_says_nothing_of_speculation(engine: FakeEngine, log: pytest.LogCaptureFixture) -> None:
    engine.now = replace(engine.now, policy="none", estimates={})
    periodic = PeriodicLog(engine.take)
    periodic.tick(0.0)
    engine.does(SpecCounts(steps=1, request_steps=2, emitted=2))
    assert periodic.tick(10.0)
    [record] = log.records
    assert record.message.endswith("Policy: none")
