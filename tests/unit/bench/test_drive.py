from __future__ import annotations

from itertools import repeat
from types import SimpleNamespace

import pytest

from dynaspec.bench.decoders import SharedModels, open_engine
from dynaspec.bench.drive import ClosedLoop, Job, SteadyLoop, cacheable, run_all, steady_window, warm_prompts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.policies.short_names import parse_policy

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.fixture
def engine(tiny):
    made = open_engine(tiny.target, parse_policy("constant:2", tiny.drafter), max_num_seqs=4)
    yield made
    made.verify_integrity()
    made.close()


class Clock:
    """Goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("dynaspec.bench.drive.time", SimpleNamespace(perf_counter=made.read))
    return made


def jobs(count: int) -> list[Job]:
    return [Job((5 + i, 6, 7), PARAMS) for i in range(count)]


def test_all_jobs_are_decoded_in_their_order(engine):
    done = run_all(engine, jobs(5), 2)
    alone = [run_all(engine, [job], 1).outputs[0] for job in jobs(5)]
    assert list(done.outputs) == alone
    assert done.output_tokens == 60
    assert max(step.counts.request_steps for step in done.steps) == 2


def test_steps_are_timed_apart_and_from_the_start(engine, clock):
    done = run_all(engine, jobs(5), 2)
    assert {step.seconds for step in done.steps} == {1.0}
    assert [step.end_s for step in done.steps] == [2.0 * i for i in range(1, len(done.steps) + 1)]
    assert done.seconds == 2.0 * len(done.steps)


def test_engines_that_share_weights_decode_as_with_their_own(engine, tiny):
    load = SharedModels()
    assert load(tiny.target) is load(tiny.target)
    assert load(tiny.target) is not load(tiny.drafter)
    expected = run_all(engine, jobs(3), 2).outputs
    specs = [parse_policy(name, tiny.drafter) for name in ("plain", "auto")]
    pair = [open_engine(tiny.target, spec, load=load, max_num_seqs=4) for spec in specs]
    for sharing in pair:
        assert run_all(sharing, jobs(3), 2).outputs == expected
    for sharing in pair:
        sharing.close()


def test_a_client_sends_its_next_request_when_it_has_its_answer(engine):
    loop = ClosedLoop(engine, repeat(Job((5, 6, 7), PARAMS)), 3)
    at_once = [loop.step().counts.request_steps for _ in range(40)]
    loop.close()
    assert not engine.unfinished
    assert len(loop.outputs) > 3
    assert max(at_once) == 3


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
