from __future__ import annotations

from itertools import repeat
from types import SimpleNamespace

import pytest

from dynaspec.bench.decoders import ClosedLoop, Job, SharedModels, open_engine, run_all
from dynaspec.control.policies.short_names import parse_policy
from support.job_engines import PARAMS, Clock, jobs, opened


@pytest.fixture
def engine(tiny):
    with opened(tiny) as made:
        yield made


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("dynaspec.bench.decoders.time", SimpleNamespace(perf_counter=made.read))
    return made


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
