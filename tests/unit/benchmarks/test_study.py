"""What studies share: rounds, and engines kept at a number of requests."""

from __future__ import annotations

from itertools import pairwise, repeat
from types import SimpleNamespace

import pytest

from dynaspec.bench.decoders import Job, run_all
from dynaspec.contract.errors import ConfigError
from study import SteadyLoop, cacheable, in_the_running, shuffled, steady_window, warm_prompts
from support.job_engines import PARAMS, Clock, jobs, opened


def test_every_side_follows_every_other_in_some_round():
    sides = ["a", "b", "c", "d"]
    rounds = [shuffled(sides, turn) for turn in range(40)]
    assert all(sorted(order) == sides for order in rounds)
    assert rounds == [shuffled(sides, turn) for turn in range(40)]
    followed = {pair for order in rounds for pair in pairwise(order)}
    assert followed == {(a, b) for a in sides for b in sides if a != b}


def test_only_who_is_behind_for_certain_sits_out():
    best = [10.0, 20.0, 10.0, 15.0, 12.0, 10.0, 11.0, 14.0, 10.0]
    behind = [0.8 * rate for rate in best]
    unlucky = [rate * share for rate, share in zip(best, (0.7, 0.8, 0.8, 0.8, 0.8, 1.1, 1.0, 1.1, 1.0), strict=True)]
    rates = {"plain": [4.0] * 9, "a": best, "b": behind, "c": unlucky, "auto": [1.0] * 9}
    assert in_the_running(rates, 0.9, always=("plain", "auto")) == ["plain", "a", "c", "auto"]
    assert in_the_running(rates, 0.7, always=()) == ["a", "b", "c"]


@pytest.fixture
def engine(tiny):
    with opened(tiny) as made:
        yield made


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("study.time", SimpleNamespace(perf_counter=made.read))
    return made


def test_a_window_counts_from_when_all_decode(engine):
    window = steady_window(engine, repeat(Job((5, 6, 7), PARAMS)), 4, 40)
    assert 40 <= window.counts.emitted <= 40 + 4 * 3
    assert window.tokens_per_second == window.counts.emitted / window.seconds
    assert not engine.unfinished


def test_stretches_of_a_window_leave_out_what_lies_between(engine, clock):
    loop = SteadyLoop(engine, repeat(Job((5, 6, 7), PARAMS)), 4)
    loop.go_on(20)
    first = loop.window
    clock.now += 1000.0
    loop.go_on(40)
    loop.close()
    assert 20 <= first.counts.emitted < 40 <= loop.window.counts.emitted
    assert first.seconds < loop.window.seconds < first.seconds + 1000.0
    assert not engine.unfinished


def test_a_window_needs_enough_requests(engine):
    with pytest.raises(ConfigError, match="ended before 1000 tokens"):
        steady_window(engine, jobs(4), 4, 1000)
    assert not engine.unfinished


def test_warm_prompts_need_no_prefill(engine):
    prompt = cacheable(list(range(5, 60)), 50, 16)
    assert len(prompt) == 49
    assert prompt[-1] == 59
    warm_prompts(engine, [prompt], 1)
    before = engine.stats()
    run_all(engine, [Job(prompt, PARAMS)], 1)
    assert (engine.stats() - before).prefill_rows == 0


@pytest.mark.parametrize(("length", "longest", "expected"), [(1, 99, 1), (16, 99, 1), (17, 99, 17), (40, 32, 17)])
def test_cacheable(length, longest, expected):
    assert len(cacheable(list(range(length)), longest, 16)) == expected
