"""The asynchronous scheduler, which this platform's engine would not run: vLLM's own, with outputs that are made up."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.request import RequestStatus

import dynaspec.hosts.vllm.compat as compat
from dynaspec.contract.errors import ConfigError
from dynaspec.hosts.vllm.report import ReportFile
from dynaspec.hosts.vllm.scheduler import AsyncScheduler, SyncScheduler
from hosts.vllm.engines import LONGEST, Recorded
from hosts.vllm.fake_runner import Runner, request, scheduler


def started(tmp_path: Path, *, blocks: int = 200, requests: int = 6, **settings: Any) -> tuple[Any, Runner, Recorded]:
    log = tmp_path / "decisions.jsonl"
    engine = scheduler(asynchronous=True, blocks=blocks, decision_log=str(log), **settings)
    for i in range(requests):
        engine.add_request(request(f"r{i}", prompt=18 + i, tokens=30 + i))
    return engine, Runner(engine, ahead=1), Recorded(log)


def test_the_factory_follows_vllm_s_configuration() -> None:
    assert isinstance(scheduler(asynchronous=True), AsyncScheduler)
    assert isinstance(scheduler(asynchronous=False), SyncScheduler)
    assert type(scheduler(asynchronous=True, speculation=None)) is VllmAsyncScheduler
    assert type(scheduler(asynchronous=False, speculation=None)) is VllmScheduler


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "auto"},
        {"policy": "heuristic", "num_speculative_tokens": 1},
        {"policy": "elastic", "draft_length_options": [1, 3, 5]},
        {"num_speculative_tokens_per_batch_size": [[1, 3, 5], [4, 64, 0]]},
    ],
    ids=lambda settings: settings.get("policy", "schedule"),
)
def test_a_plan_s_lengths_are_those_of_the_next_step(settings: dict[str, Any], tmp_path: Path) -> None:
    engine, runner, decided = started(tmp_path, **settings)
    runner.run()
    engine.shutdown()
    assert runner.tokens == {f"r{i}": 30 + i for i in range(6)}
    plans = decided.plans
    assert plans[0].view.limits.plan_lag == 2
    granted = {
        (call.view.step, name): k for call in plans for name, k in zip(call.view.ids, call.plan.depth, strict=True)
    }
    for step, drafts in enumerate(runner.scheduled[1:], 1):
        for name, count in drafts.items():
            assert count <= granted[step - 1, name]
    assert any(runner.scheduled)
    assert len(set(decided.lengths)) > 1
    assert all(v <= d for o in decided.outcomes for v, d in zip(o.verified, o.drafted, strict=True))
    # All tokens but each request's first, which its prompt brings.
    assert sum(sum(outcome.emitted) for outcome in decided.outcomes) == sum(29 + i for i in range(6))
    assert decided.replayed().identical


def test_requests_of_different_lengths_share_no_placeholders(tmp_path: Path) -> None:
    engine, runner, _ = started(tmp_path, policy="constant")
    engine.add_request(request("wish", dynaspec={"num_speculative_tokens": 2}))
    for _ in range(4):
        runner.step()
    lengths = {name: len(r.spec_token_ids) for name, r in engine.requests.items()}
    assert lengths["wish"] == 2
    assert set(lengths.values()) == {2, LONGEST}
    assert max(drafts["wish"] for drafts in runner.scheduled if "wish" in drafts) == 2


def test_preempted_and_aborted_requests_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner, decided = started(tmp_path, blocks=14, policy="constant")
    preempted: list[Any] = []
    preempt = engine._preempt_request

    def noted(request: Any, *rest: Any, **named: Any) -> None:
        preempted.append(request)
        preempt(request, *rest, **named)

    monkeypatch.setattr(engine, "_preempt_request", noted)
    for _ in range(12):
        runner.step()
    engine.finish_requests(["r1"], RequestStatus.FINISHED_ABORTED)
    runner.run()
    engine.shutdown()
    assert engine._pilot.deciding
    assert {name: n for name, n in runner.tokens.items() if name != "r1"} == {
        f"r{i}": 30 + i for i in range(6) if i != 1
    }
    assert preempted
    assert engine._pilot._steps == {}
    assert engine._pilot._driver._drafts == {}
    assert decided.replayed().identical


def test_after_a_fault_every_step_drafts_the_longest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner, _ = started(tmp_path, policy="heuristic", num_speculative_tokens=1)
    for _ in range(5):
        runner.step()
    monkeypatch.setattr(engine._pilot._driver, "schedule", None)
    runner.run()
    assert runner.tokens == {f"r{i}": 30 + i for i in range(6)}
    assert max(max(drafts.values(), default=0) for drafts in runner.scheduled[8:]) == LONGEST
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR and r.name.startswith("dynaspec")]
    assert len(errors) == 1


def test_reports_are_where_stat_loggers_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner, _ = started(tmp_path, policy="auto")
    reader, reports = ReportFile.of_engine(engine.vllm_config, 0), []
    update = engine.update_from_output

    def noted(*given: Any) -> Any:
        told = update(*given)
        reports.append(reader.read())
        return told

    monkeypatch.setattr(engine, "update_from_output", noted)
    runner.run()
    last = [report for report in reports if report is not None][-1]
    assert last.counts.emitted == sum(29 + i for i in range(6))
    assert (last.policy, last.deciding, last.running) == ("auto", True, 0)


def test_data_parallel_ranks_draft_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def two_ranks(config: Any) -> None:
        config.parallel_config.data_parallel_size = 2

    log = tmp_path / "decisions.jsonl"
    engine = scheduler(asynchronous=True, change=two_ranks, policy="heuristic", decision_log=str(log))
    engine.add_request(request("a"))
    runner = Runner(engine, ahead=1)
    drafted = []
    for _ in range(8):
        drafted.append(engine._pilot._driver.k)
        runner.step()
    assert set(drafted[1:]) == {LONGEST}
    said = [r.getMessage() for r in caplog.records if r.name.startswith("dynaspec")]
    assert said == [f"every step drafts {LONGEST} tokens: data_parallel_size is 2 and its ranks must draft alike"]
    assert (tmp_path / "decisions.0.jsonl").exists()


def test_a_vllm_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.check_vllm().startswith("0.3")
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    with pytest.raises(ConfigError, match=r"^vLLM is 0\.31\.0; expected one of 0\.32 and 0\.33"):
        scheduler(asynchronous=False)
