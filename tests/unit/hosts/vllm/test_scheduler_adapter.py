"""What a scheduler of vLLM calls: faults cost nothing but the decisions, and reports reach the metrics."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynaspec.contract.step import StepView
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from dynaspec.hosts.vllm.report import Gauges, Report, ReportFile
from dynaspec.hosts.vllm.scheduler_adapter import SchedulerAdapter, build_adapter
from dynaspec.hosts.vllm.settings import Settings, VllmSpeculation
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.decision_log import read_calls, read_header
from dynaspec.simulate.recorded import replay
from unit.hosts.vllm.test_reading import config, request

NGRAM = VllmSpeculation(method="ngram", longest=4, lookup=(1, 3), target="target")


class Failing:
    """Fails when it is asked for the third time."""

    def __init__(self, call: str, inner: Any) -> None:
        self._call, self._inner, self._left = call, inner, 2

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("no")
        return getattr(self._inner, name)


class Engine:
    """vLLM's events around a adapter, for one request whose drafts are all accepted."""

    def __init__(self, folder: Path, call: str | None = None) -> None:
        settings = Settings.read({"policy": "constant"}, NGRAM, {})
        controller: Any = build_controller(settings.config, settings.limits)
        if call is not None:
            controller = Failing(call, controller)
        self.now = 0.0
        self.adapter = SchedulerAdapter(
            settings,
            controller,
            None,
            reports=ReportFile(folder / "own" / "report.json"),
            max_model_len=100,
            drafter_len=90,
            clock=self.clock,
        )
        self.request = request(num_computed_tokens=10, num_tokens=11, num_output_tokens=1, spec_token_ids=[])
        self.kept: list[int] = []
        self.reader = ReportFile(folder / "own" / "report.json")
        """The server's end."""
        self.reports: list[Report | None] = []

    def clock(self) -> float:
        self.now += 0.01
        return self.now

    def step(self, finished: tuple[str, ...] = ()) -> int | None:
        """The draft length that was decided; None = none was."""
        r, drafts = self.request, len(self.kept)
        output = SimpleNamespace(
            num_scheduled_tokens={"a": 1 + drafts},
            scheduled_spec_decode_tokens={"a": self.kept} if drafts else {},
            num_invalid_spec_tokens=None,
            finished_req_ids=set(finished),
            preempted_req_ids=None,
        )
        self.adapter.begin()
        step = self.adapter.schedule({"a": r}, 0, output)
        r.num_computed_tokens += 1 + drafts
        ran = SimpleNamespace(req_id_to_index={"a": 0}, sampled_token_ids=[[1] * (1 + drafts)])
        sampled = self.adapter.sampled(output, ran)
        r.num_tokens += 1 + drafts
        r.num_output_tokens += 1 + drafts
        out = SimpleNamespace(request_id="a", new_token_ids=[1] * (1 + drafts))
        self.adapter.commit(output, sampled, {0: SimpleNamespace(outputs=[out], scheduler_stats=object())}, running=1)
        self.reports.append(self.reader.read())
        k = self.adapter.longest if step is None else step.k
        (self.kept,) = self.adapter.keep(["a"], [[7] * k])
        r.spec_token_ids = self.kept
        self.adapter.checked({"a": r}, ["a"])
        return None if step is None else step.k


def test_steps_are_decided_on(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    assert [engine.step() for _ in range(3)] == [4, 4, 4]
    assert engine.kept == [7] * 4


@pytest.mark.parametrize("call", ["plan", "trim", "observe", "forget"])
def test_after_a_fault_vllm_goes_on_alone(tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tmp_path, call)
    finished = ("b",) if call == "forget" else ()
    decided = [engine.step(finished) for _ in range(6)]
    assert not engine.adapter.deciding
    assert decided[0] == 4
    assert decided[-1] is None
    assert engine.kept == [7] * 4  # all that the runner has drafted
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        "dynaspec has failed; from now on vLLM drafts 4 tokens in every step"
    ]


def test_numbers_that_cannot_be_told_cost_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    monkeypatch.setattr(engine.adapter._tracker, "stats", None)
    assert engine.step() == 4
    engine.now += 10.0
    engine.step()
    assert any("metrics have failed" in record.getMessage() for record in caplog.records)


def test_a_wish_is_honoured_and_one_that_cannot_be_understood_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tmp_path)
    engine.request.sampling_params.extra_args = {"dynaspec": {"num_speculative_tokens": 2}}
    assert [engine.step() for _ in range(2)] == [2, 2]
    engine = Engine(tmp_path)
    engine.request.sampling_params.extra_args = {"dynaspec": {"num_speculative_tokens": "many"}}
    assert [engine.step() for _ in range(3)] == [4, 4, 4]
    assert len(caplog.records) == 1


def test_close_to_the_drafter_s_end_nothing_is_drafted(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.request.num_computed_tokens, engine.request.num_tokens = 90, 91
    assert engine.step() == 0
    assert engine.kept == []


def test_reports_are_written_now_and_then(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for _ in range(40):
        engine.request.max_tokens = 1000
        engine.request.num_prompt_tokens = engine.request.num_computed_tokens = 10
        engine.request.num_tokens, engine.request.num_output_tokens = 11, 1
        engine.step()
    reports = [report for report in engine.reports if report is not None]
    assert 2 <= len(reports) < 20
    assert reports[-1].policy == "constant"
    assert reports[-1].k == 4
    assert reports[-1].counts.accepted > reports[0].counts.accepted
    engine.adapter.close()
    assert list((tmp_path / "own").iterdir()) == []


def test_each_report_is_read_once(tmp_path: Path) -> None:
    writer, reader = (ReportFile(tmp_path / "own" / "report.json") for _ in range(2))
    assert reader.read() is None
    report = Report(policy="auto", longest=5, k=3, deciding=True, running=1, goodput=12.5, counts=SpecCounts(drafts=4))
    writer.write(report)
    assert reader.read() == report
    assert reader.read() is None
    writer.write(replace(report, k=2))
    assert reader.read() == replace(report, k=2)
    writer.remove()
    writer.remove()
    assert reader.read() is None


def test_engine_and_server_find_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = Report(policy="auto", longest=5, k=3, deciding=True, running=1, goodput=None)
    ReportFile.of_engine(SimpleNamespace(instance_id="ab1_dp1"), 1).write(report)
    server = SimpleNamespace(instance_id="ab1")
    assert ReportFile.of_engine(server, 1).read() == report
    assert ReportFile.of_engine(server, 0).read() is None
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0


def test_metrics_are_named_as_the_embedded_engine_s() -> None:
    registry = CollectorRegistry()
    gauges = Gauges(("engine",), registry)
    first = SpecCounts(drafts=4, accepted=6, accepted_per_pos=(4, 2), request_steps=5)
    values: dict[str, Any] = {"policy": "auto", "longest": 3, "deciding": True, "goodput": 50.0}
    drafting = {"mode": "speculate", "expected_tokens": 6.0, "expected_step_s": 0.1}
    plain = {"mode": "plain", "expected_tokens": 2.0, "expected_step_s": 0.05}
    gauges.show(Report(**values, k=3, running=2, counts=first, estimates=drafting), ["0"])
    gauges.show(Report(**values, k=0, running=2, counts=first + first, estimates=plain), ["0"])
    engine = {"engine": "0"}
    sample = registry.get_sample_value
    assert sample("dynaspec:draft_length_chosen", engine) == 0
    assert sample("dynaspec:controller_enabled", engine) == 1
    assert sample("dynaspec:spec_decode_num_drafts_total", engine) == 8
    assert sample("dynaspec:spec_decode_num_accepted_tokens_total", engine) == 12
    assert sample("dynaspec:spec_decode_num_accepted_tokens_per_pos_total", {**engine, "position": "1"}) == 4
    assert sample("dynaspec:goodput_predicted", engine) == 40.0
    assert sample("dynaspec:goodput_measured", engine) == 50.0
    assert sample("dynaspec:guard_state", {**engine, "state": "plain"}) == 1
    assert sample("dynaspec:guard_state", {**engine, "state": "speculate"}) == 0
    assert sample("dynaspec:engine_info", {**engine, "policy": "auto"}) == 1
    gauges.show(Report(**values, k=0, running=0, counts=first + first), ["0"])
    predicted = sample("dynaspec:goodput_predicted", engine)
    assert predicted != predicted  # nothing runs, so there is no number
    with pytest.raises(ValueError, match="Duplicated"):
        Gauges(("engine",), registry)


# --- built from vLLM's configuration ------------------------------------------------------------------------------


def built(tmp_path: Path, **told: Any) -> SchedulerAdapter:
    vllm_config = config()
    vllm_config.additional_config = {"dynaspec": told} if told else {}
    return build_adapter(vllm_config, lambda: 0.0)


def test_ranks_that_draft_alike_are_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert built(tmp_path).longest == 5
    assert [record.getMessage() for record in caplog.records] == [
        "every step drafts 5 tokens: data_parallel_size is 2 and its ranks must draft alike"
    ]


def test_a_decision_log_replays_to_the_same_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "decisions.jsonl"
    settings = Settings.read({"decision_log": str(path)}, NGRAM, {})
    vllm_config = config(method="ngram", model=None, prompt_lookup_min=1, prompt_lookup_max=3, draft_model_config=None)
    vllm_config.parallel_config.data_parallel_size = 1
    vllm_config.scheduler_config.async_scheduling = False
    vllm_config.additional_config = {"dynaspec": {"decision_log": str(path)}}
    engine = Engine(tmp_path)
    engine.adapter = build_adapter(vllm_config, engine.clock)
    engine.request.max_tokens = 60
    for _ in range(30):
        engine.step()
        if engine.request.num_output_tokens >= 60:
            break
    engine.adapter.close()
    header = read_header(path)
    assert header.fields["host"] == "vllm"
    view = next(call.view for call in read_calls(path) if isinstance(getattr(call, "view", None), StepView))
    controller = build_controller(SpeculativeConfig.parse(header.fields["speculative_config"]), view.limits)
    result = replay(path, controller)
    assert result.identical
    assert result.plans > 5
    assert settings.config.policy == "auto"
