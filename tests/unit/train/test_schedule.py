from __future__ import annotations

from datetime import datetime

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.train.schedule import Budget, Schedule, parse_until


def test_warm_up_stable_decay():
    schedule = Schedule(warmup_steps=4, decay_share=0.25)
    assert [schedule.factor(step, 0.0) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule.factor(100, 0.75) == 1.0
    assert schedule.factor(100, 0.875) == pytest.approx(0.5)
    assert schedule.factor(100, 1.0) == 0.0
    assert not schedule.decaying(0.75)
    assert schedule.decaying(0.76)


def test_without_decay_the_rate_stays():
    assert Schedule(0, 0.0).factor(0, 0.999) == 1.0


def test_budget_of_steps_and_seconds():
    assert Budget(max_steps=8).progress(2, 1e9) == 0.25
    assert Budget(max_seconds=60.0).progress(2, 15.0) == 0.25
    assert Budget(max_steps=8, max_seconds=60.0).progress(2, 45.0) == 0.75
    assert Budget(max_steps=8).seconds_left(2, 10.0) == 30.0
    assert Budget(max_steps=8).seconds_left(0, 0.0) == float("inf")


def test_time_of_day_counts_what_is_left():
    now = [1000.0]
    budget = Budget(until=2000.0, now=lambda: now[0])
    assert budget.progress(0, 0.0) == 0.0
    now[0] = 1250.0
    assert budget.progress(5, 250.0) == 0.25
    now[0] = 1500.0  # stood still for 250 seconds: the rest goes faster, the end stays
    assert budget.progress(5, 250.0) == pytest.approx(1 / 3)
    assert budget.seconds_left(5, 250.0) == 500.0
    now[0] = 2000.0
    assert budget.progress(6, 251.0) == 1.0


def test_a_budget_divides():
    whole = Budget(max_steps=100, max_seconds=200.0, until=1100.0, now=lambda: 1000.0)
    part, rest = whole.part(0.25), whole.after(0.25)
    assert (part.max_steps, part.max_seconds, part.until) == (25, 50.0, 1025.0)
    assert (rest.max_steps, rest.max_seconds, rest.until) == (75, 150.0, 1100.0)


def test_no_budget_is_refused():
    with pytest.raises(ConfigError, match="budget: got none"):
        Budget()


def test_until_reads_clock_and_date():
    now = datetime(2026, 3, 1, 12, 0)
    assert parse_until("12:30", now) == datetime(2026, 3, 1, 12, 30).timestamp()
    assert parse_until("11:30", now) == datetime(2026, 3, 2, 11, 30).timestamp()
    assert parse_until("2026-03-05T08:00", now) == datetime(2026, 3, 5, 8, 0).timestamp()
    for text in ("soon", "25:99"):
        with pytest.raises(ConfigError, match=f"until: got '{text}', expected HH:MM"):
            parse_until(text, now)
