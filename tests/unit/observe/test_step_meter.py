from __future__ import annotations

import pytest

from dynaspec.contract.step import StepOutcome, Work
from dynaspec.observe.stats import RECENT_STEPS, SpecStats, StepMeter


def step(emitted: tuple[int, ...], seconds: float, prefill: int = 0) -> StepOutcome:
    size = len(emitted)
    return StepOutcome(
        plan_step=1, ids=tuple(map(str, range(size))), proposer=(0,) * size, requested=(0,) * size,
        drafted=(0,) * size, verified=(0,) * size, accepted=(0,) * size, emitted=emitted, ended=("none",) * size,
        early_exit=(False,) * size, confidence=((),) * size, work=Work(prefill_rows=prefill), step_s=seconds,
    )  # fmt: skip


def test_times_and_sizes() -> None:
    meter = StepMeter()
    meter.record(step((1, 3), 0.5, prefill=10))
    meter.record(step((), 0.25, prefill=6))
    totals = meter.snapshot()
    assert (totals.step_s.count, totals.step_s.total) == (2, pytest.approx(0.75))
    assert (totals.tokens.count, totals.tokens.total) == (2, 20.0)
    assert (totals.batch_size.count, totals.batch_size.total) == (1, 2.0), "steps of prefill alone have no batch"


def test_goodput_is_that_of_steps_without_prefill() -> None:
    meter = StepMeter()
    meter.record(step((1,), 100.0, prefill=5))
    assert meter.snapshot().recent_goodput is None
    meter.record(step((2, 2), 0.5))
    assert meter.snapshot().recent_goodput == pytest.approx(8.0)


def test_goodput_follows_what_happens_now() -> None:
    meter = StepMeter()
    for _ in range(10 * RECENT_STEPS):
        meter.record(step((1,), 1.0))
    slow = meter.snapshot().recent_goodput
    for _ in range(10 * RECENT_STEPS):
        meter.record(step((4,), 1.0))
    fast = meter.snapshot().recent_goodput
    assert slow == pytest.approx(1.0)
    assert fast == pytest.approx(4.0, rel=0.01)


def test_counts_and_meter_see_the_same_steps() -> None:
    stats = SpecStats()
    for outcome in (step((1,), 0.1), step((2, 1), 0.2, prefill=4)):
        stats.record(outcome)
    counts, totals = stats.snapshot(), stats.steps.snapshot()
    assert totals.step_s.count == counts.steps
    assert totals.step_s.total == pytest.approx(counts.step_s)
    assert totals.tokens.total == counts.emitted + counts.prefill_rows
    assert totals.batch_size.total == counts.request_steps
