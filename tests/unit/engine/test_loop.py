"""Serial and overlapped loops over the real step, scheduler, proposers and verifier, with fake models."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from dynaspec.contract.step import StopRule
from dynaspec.engine.loop import OverlappedLoop
from dynaspec.schedule.request import Request
from unit.engine.fakes import Result, Rig, plain_decode, prompt, request

CYCLE = (5, 3, 0, 5)
SIZES = (3, 40, 17, 1, 26, 16)


def requests(**params: Any) -> list[Request]:
    return [request(f"r{i}", prompt(size, i), most=18 + i, **params) for i, size in enumerate(SIZES)]


def plain(**params: Any) -> dict[str, Result]:
    """What plain decoding without shortage gives."""
    rig = Rig(max_seqs=8, num_blocks=128, order=params.pop("order", None))
    return rig.run(requests(**params))


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("drafter", ["none", "draft_model", "ngram"])
@pytest.mark.parametrize("shape", [{}, {"num_blocks": 5}, {"max_rows": 9, "max_seqs": 3}, {"caching": False}])
def test_greedy_output_is_the_models_own(overlapped: bool, drafter: str, shape: dict[str, Any]) -> None:
    order = 1 if drafter == "ngram" else None
    rig = Rig(CYCLE, drafter, overlapped, order=order, **shape)
    results = rig.run(requests())
    for i, size in enumerate(SIZES):
        assert list(results[f"r{i}"].output) == plain_decode(prompt(size, i), 18 + i, order=order)
        assert results[f"r{i}"].finish_reason == "length"
    if "num_blocks" in shape:
        assert rig.scheduler.preemptions > 0
    if drafter != "none":
        assert 0 < rig.stats.snapshot().accepted < rig.stats.snapshot().verified
    assert rig.tables.pool.free_count == rig.num_blocks


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
def test_seeded_output_is_that_of_plain_decoding(overlapped: bool, drafter: str) -> None:
    options: dict[str, Any] = {"temperature": 0.7, "seed": 11, "top_k": 12}
    order = 2 if drafter == "ngram" else None
    rig = Rig(CYCLE, drafter, overlapped, num_blocks=5, order=order)
    assert rig.run(requests(**options)) == plain(**options, order=order)
    assert rig.scheduler.preemptions > 0
    assert all(guard.enabled for guard in rig.guards)


@pytest.mark.parametrize("overlapped", [False, True])
def test_penalties_minimum_and_stop_tokens_are_those_of_plain_decoding(overlapped: bool) -> None:
    options: dict[str, Any] = {
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "min_tokens": 4,
        "stop_ids": (1, 4, 6, 9),
        "stop_token_ids": (1, 4, 6, 9),
    }
    expected = plain(**options)
    rig = Rig(CYCLE, "draft_model", overlapped, num_blocks=7)
    assert rig.run(requests(**options)) == expected
    assert {result.finish_reason for result in expected.values()} == {"stop", "length"} or all(
        result.finish_reason == "stop" for result in expected.values()
    )
    assert min(len(result.output) for result in expected.values()) >= 4


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
def test_unseeded_sampling_runs_through(overlapped: bool, drafter: str) -> None:
    rig = Rig(CYCLE, drafter, overlapped, num_blocks=7, order=1)
    results = rig.run(requests(temperature=0.8))
    assert [len(result.output) for result in results.values()] == [18, 19, 20, 21, 22, 23]
    assert all(guard.enabled for guard in rig.guards)


@pytest.mark.parametrize("at", range(1, 9))
def test_aborts_in_flight_leave_the_others_alone(at: int) -> None:
    rig = Rig(CYCLE, "draft_model", overlapped=True, num_blocks=8)
    everyone = requests()
    for one in everyone:
        rig.scheduler.add(one)
    for _ in range(at):
        rig.advance()
    for one in (everyone[0], everyone[4]):
        rig.scheduler.abort(one)
        rig.scheduler.verify_integrity()
    rig.finish()
    for i, one in enumerate(everyone):
        expected = plain_decode(prompt(SIZES[i], i), 18 + i)
        assert one.output == expected[: len(one.output)]
        if i not in (0, 4):
            assert one.output == expected


def test_all_aborted_while_a_step_is_in_flight() -> None:
    rig = Rig((4,), "draft_model", overlapped=True)
    gone = requests()
    for one in gone:
        rig.scheduler.add(one)
    for _ in range(4):
        rig.advance()
    for one in gone:
        rig.scheduler.abort(one)
    assert rig.tables.pool.free_count == rig.num_blocks
    later = request("later", prompt(20, 77))
    assert list(rig.run([later])["later"].output) == plain_decode(prompt(20, 77), 20)


def test_the_overlapped_loop_really_plans_ahead() -> None:
    rig = Rig((4,), "draft_model", overlapped=True, deviates=1.0)
    rig.scheduler.add(request("a", prompt(5), most=30))
    rig.advance()
    rig.advance()
    committed = rig.lanes.length[0]
    assert rig.controller.views[-1].context_len == (committed + 4,)  # four drafts that were all rejected
    rig.finish()


def test_drafts_are_trimmed_before_the_target_runs() -> None:
    rig = Rig((5,), "draft_model", keep=2)
    rig.run(requests())
    assert max(n for outcome in rig.controller.outcomes for n in outcome.verified) == 2
    assert max(n for outcome in rig.controller.outcomes for n in outcome.drafted) == 5


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("scope", ["request", "batch_mean"])
@pytest.mark.parametrize("signal", ["confidence", "token_prob", "survival"])
def test_stopping_early_changes_no_token(overlapped: bool, scope: Any, signal: Any) -> None:
    stop = StopRule((0.5, 0.3, 0.6), scope, signal, weight=0.5, bias=(0.0, 0.2))
    rig = Rig((6,), "draft_model", overlapped, num_blocks=7, stop=stop)
    assert rig.run(requests()) == plain()
    outcomes = rig.controller.outcomes
    early = [flag for outcome in outcomes for flag in outcome.early_exit]
    assert any(early)
    assert not all(early)


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_controller_hears_of_every_step_once_and_in_order(overlapped: bool) -> None:
    rig = Rig(CYCLE, "draft_model", overlapped)
    results = rig.run(requests())
    steps = [outcome.plan_step for outcome in rig.controller.outcomes]
    assert steps == sorted(set(steps))
    assert sorted(rig.controller.forgotten) == sorted(results)
    emitted = sum(sum(outcome.emitted) for outcome in rig.controller.outcomes)
    chunk_tokens = sum(size > 1 for size in SIZES)
    assert chunk_tokens - 1 <= sum(len(r.output) for r in results.values()) - emitted <= chunk_tokens


@pytest.mark.parametrize("overlapped", [False, True])
def test_what_planning_took_is_a_part_of_the_step_unless_it_was_done_before(overlapped: bool) -> None:
    rig = Rig(CYCLE, "draft_model", overlapped)
    rig.run(requests())
    took = [outcome.plan_s for outcome in rig.controller.outcomes]
    assert all(0.0 <= s < o.step_s for s, o in zip(took, rig.controller.outcomes, strict=True))
    assert (sum(s > 0.0 for s in took) > 0.9 * len(took)) is not overlapped


def test_outcomes_count_the_work_really_done() -> None:
    rig = Rig(CYCLE, "draft_model", max_rows=16)
    rig.run(requests())
    rows = [o.work.verify_rows + o.work.prefill_rows for o in rig.controller.outcomes]
    assert rows == rig.target.rows
    assert max(rows) <= 16
    assert [n for o in rig.controller.outcomes for n in o.work.rows_per_pass] == rig.draft_model.rows
    for outcome in rig.controller.outcomes:
        assert outcome.work.verify_rows == sum(outcome.verified) + len(outcome.ids)
        for ended, verified, accepted in zip(outcome.ended, outcome.verified, outcome.accepted, strict=True):
            assert (ended == "none") == (verified == 0)
            if ended == "all_accepted":
                assert accepted == verified > 0
            if ended == "rejected":
                assert accepted < verified


def test_an_error_in_a_step_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig((0,), overlapped=True)
    rig.scheduler.add(request("a", prompt(5)))

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rig.target, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        rig.advance()
    rig.loop.close()


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 2, 5, 9])
def test_after_a_failed_step_everyone_goes_on(overlapped: bool, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(CYCLE, "draft_model", overlapped, num_blocks=9)
    everyone = requests()
    for one in everyone:
        rig.scheduler.add(one)
    real, calls = rig.target.forward, iter(range(10_000))

    def fail_once(*arguments: Any) -> Any:
        if next(calls) == failing:
            raise RuntimeError("out of memory")
        return real(*arguments)

    monkeypatch.setattr(rig.target, "forward", fail_once)
    with pytest.raises(RuntimeError, match="out of memory"):
        rig.finish()
    rig.scheduler.verify_integrity()
    rig.finish()
    assert {one.id: Result.of(one) for one in everyone} == plain()
    assert rig.tables.pool.free_count == rig.num_blocks


def test_closing_waits_for_the_step_in_flight() -> None:
    rig = Rig((3,), "draft_model", overlapped=True)
    rig.scheduler.add(request("a", prompt(5)))
    rig.advance()
    assert isinstance(rig.loop, OverlappedLoop)
    rig.loop.close()
    passes = len(rig.target.reads)
    assert passes <= 2  # one committed, one in flight if it had begun
    assert rig.loop._in_flight is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dynaspec-step")]


@pytest.mark.parametrize("seed", range(12))
def test_random_histories(seed: int) -> None:
    """Requests come, stop, are aborted and preempted in any order; whoever stays gets the model's own tokens."""
    rng = np.random.default_rng(seed)
    rig = Rig(
        tuple(rng.integers(0, 7, 5).tolist()),
        "draft_model",
        overlapped=bool(seed % 2),
        num_blocks=int(rng.integers(6, 12)),
        max_seqs=int(rng.integers(2, 5)),
        max_rows=int(rng.integers(6, 40)),
        keep=None if seed % 3 else 2,
    )
    everyone: list[Request] = []
    for step in range(60):
        if step < 30 and rng.random() < 0.4:
            size = int(rng.integers(1, 50))
            base = prompt(50, int(rng.integers(0, 3)))[:size]
            stop = [int(rng.integers(0, 32))]
            everyone.append(request(f"r{step}", base, most=int(rng.integers(1, 30)), stop_ids=stop))
            rig.scheduler.add(everyone[-1])
        if everyone and rng.random() < 0.1:
            rig.scheduler.abort(everyone[int(rng.integers(len(everyone)))])
        rig.advance()
    rig.finish()
    for one in everyone:
        expected = plain_decode(one.prompt.tolist(), one.max_length - len(one.prompt))
        stop_at = next((i + 1 for i, token in enumerate(expected) if token in one.stop_ids), len(expected))
        if one.finish_reason == "abort":
            assert one.output == expected[: len(one.output)]
        else:
            assert one.output == expected[:stop_at]
    assert rig.tables.pool.free_count == rig.num_blocks
