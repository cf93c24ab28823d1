"""Learning rate, budgets, and Muon."""

from __future__ import annotations

from datetime import datetime

import pytest
import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.train.model import build
from dynaspec.train.optimizer import (
    Budget,
    Optimizers,
    Rates,
    RateSchedule,
    _by_gram,
    _directly,
    orthogonalise,
    parse_until,
)
from unit.train.conftest import TINY


def test_warm_up_stable_decay():
    schedule = RateSchedule(warmup_steps=4, decay_share=0.25)
    assert [schedule.factor(step, 0.0) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule.factor(100, 0.75) == 1.0
    assert schedule.factor(100, 0.875) == pytest.approx(0.5)
    assert schedule.factor(100, 1.0) == 0.0
    assert not schedule.decaying(0.75)
    assert schedule.decaying(0.76)


def test_without_decay_the_rate_stays():
    assert RateSchedule(0, 0.0).factor(0, 0.999) == 1.0


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


def test_budget_of_tokens():
    budget = Budget(max_tokens=400)
    assert budget.progress(2, 1e9, 100) == 0.25
    assert budget.seconds_left(2, 10.0, 100) == 30.0
    assert budget.seconds_left(0, 0.0) == float("inf")
    assert (budget.part(0.25).max_tokens, budget.after(0.25).max_tokens) == (100, 300)


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


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16), (8, 9)])
def test_singular_values_come_near_one(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_both_ways_agree():
    torch.manual_seed(0)
    x = torch.randn(12, 40)
    x = x / x.norm()
    assert torch.allclose(_by_gram(x, 5), _directly(x, 5), atol=1e-4)
    assert torch.equal(orthogonalise(torch.zeros(4, 4)), torch.zeros(4, 4))


def test_each_weight_has_one_optimizer():
    model = build(TINY, seed=0)
    optimizers = Optimizers(model, Rates())
    muon, adamw = (optimizer for optimizer, _ in optimizers._peaks)
    owned = [p for o in (muon, adamw) for g in o.param_groups for p in g["params"]]
    assert len(owned) == len({id(p) for p in owned}) == len(list(model.parameters()))
    assert all(p.ndim == 2 for g in muon.param_groups for p in g["params"])
    assert any(p is model.model.embed_tokens.weight for g in adamw.param_groups for p in g["params"])
