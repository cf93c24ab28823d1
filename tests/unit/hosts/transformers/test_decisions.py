"""What is decided, counted, logged and learnt."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaspec.contract.step import DraftView, Limits, SpecPlan, StepOutcome, StepView
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.planner import ChainPlanner
from dynaspec.control.registry import build_controller
from dynaspec.explain.report import analyse, write_report
from dynaspec.hosts.transformers import Session, generate
from dynaspec.observe.decision_log import ObserveCall, PlanCall, TrimCall, read_calls, read_header
from dynaspec.observe.stats import SpecStats
from dynaspec.simulate.recorded import replay
from unit.hosts.transformers.driving import GREEDY, decide_with, ours, plain
from unit.hosts.transformers.pairs import Models
from unit.hosts.transformers.test_identity import POLICIES


class Scripted:
    """Lengths one after the other, and what came of them."""

    def __init__(self, limits: Limits, lengths: list[int], fails_at: int | None = None, fails_in: str = "plan") -> None:
        self._planner = ChainPlanner(limits)
        self._lengths = lengths
        self._fails = fails_at, fails_in
        self.views: list[StepView] = []
        self.drafts: list[DraftView] = []
        self.outcomes: list[StepOutcome] = []
        self.forgotten: list[str] = []

    def plan(self, view: StepView) -> SpecPlan:
        self._perhaps_fail("plan")
        self.views.append(view)
        return self._planner.plan(view, [self._lengths[(len(self.views) - 1) % len(self._lengths)]])

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        self._perhaps_fail("trim")
        self.drafts.append(drafts)
        return self._planner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        self._perhaps_fail("observe")
        self.outcomes.append(outcome)

    def forget(self, ids: tuple[str, ...]) -> None:
        self.forgotten += ids

    def _perhaps_fail(self, call: str) -> None:
        if self._fails == (len(self.views), call):
            raise RuntimeError("on purpose")


def scripted(monkeypatch: pytest.MonkeyPatch, lengths: list[int], **options: Any) -> list[Scripted]:
    made: list[Scripted] = []
    decide_with(monkeypatch, lambda limits: made.append(Scripted(limits, lengths, **options)) or made[-1])
    return made


def test_the_seam_says_what_happened(decoder: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scripted(monkeypatch, [3, 0, 0, 2])
    prompt = decoder.inputs.shape[1]
    output, counts = ours(decoder, {"num_assistant_tokens": 3})
    (script,) = made
    text = output[0].tolist()
    length = prompt
    for i, (view, drafts, outcome) in enumerate(zip(script.views, script.drafts, script.outcomes, strict=True)):
        assert view.context_len == (length,)
        assert view.prefill_tokens == (prompt - 1 if i == 0 else 0)
        assert outcome.plan_step == view.step == i
        assert outcome.drafted == drafts.length == outcome.verified
        assert outcome.requested[0] == min([3, 0, 0, 2][i % 4], view.room_depth[0])
        assert [len(row) for row in outcome.confidence] == list(outcome.drafted)
        assert all(0.0 < value <= 1.0 for value in outcome.confidence[0])
        assert outcome.emitted[0] in (outcome.accepted[0], outcome.accepted[0] + 1)
        work = outcome.work
        assert work.verify_rows == 1 + outcome.verified[0]
        assert work.prefill_rows == view.prefill_tokens
        first = length - work.prefill_rows
        assert work.kv_tokens == sum(range(first, length + work.verify_rows))
        assert len(work.rows_per_pass) == outcome.drafted[0]
        if outcome.drafted[0]:  # Transformers lets the assistant read the last token that it knew once more
            assert view.lag[0][0] + 1 <= work.rows_per_pass[0] <= view.lag[0][0] + 2
            assert outcome.ended[0] in ("rejected", "all_accepted", "stopped")
        else:
            assert outcome.ended == ("none",)
        assert outcome.step_s >= outcome.draft_s + outcome.verify_s > 0
        length += outcome.emitted[0]
    assert length == len(text)
    assert script.views[-1].lag[0][0] >= 0
    assert max(view.lag[0][0] for view in script.views[4:]) >= 2  # after steps without drafts
    assert script.forgotten == ["generate-0"]
    assert counts.emitted == len(text) - prompt
    assert counts.skipped["policy"] >= 2


def test_statistics_go_to_the_caller_and_add_up(decoder: Models) -> None:
    stats = SpecStats()
    for _ in range(2):
        output = generate(
            decoder.target, decoder.inputs, assistant_model=decoder.assistant, stats=stats, session=Session(), **GREEDY
        )
    counts = stats.snapshot()
    assert counts.emitted == 2 * (output.shape[1] - decoder.inputs.shape[1])
    assert counts.emitted == counts.accepted + counts.steps
    assert counts.draft_tokens == sum(counts.drafted_per_pos)
    assert counts.accepted == sum(counts.accepted_per_pos)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_log_replays_to_identical_plans(decoder: Models, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "log.jsonl"
    with Session(decision_log=path) as session:
        for _ in range(2):
            ours(decoder, POLICIES[policy], session=session)
    header = read_header(path)
    limits = next(call.view.limits for call in read_calls(path) if isinstance(call, PlanCall))
    config = SpeculativeConfig.parse(header.speculative_config, {})
    result = replay(path, build_controller(config, limits, costs=header.costs))
    assert result.first is None, str(result.first)
    assert result.plans == session.stats.snapshot().steps


def test_a_log_can_be_explained(decoder: Models, tmp_path: Path) -> None:
    path, report = tmp_path / "log.jsonl", tmp_path / "report.html"
    generate(decoder.target, decoder.inputs, assistant_model=decoder.assistant, decision_log=path, **GREEDY)
    analysis = analyse(path)
    write_report(analysis, report, "Decisions")
    assert analysis.summary
    assert "<svg" in report.read_text("utf-8")
    assert json.loads(path.read_text("utf-8").splitlines()[0])["header"]["host"] == "transformers"


def test_auto_varies_its_lengths(decoder: Models, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    generate(decoder.target, decoder.inputs, assistant_model=decoder.assistant, decision_log=path, **GREEDY)
    lengths = {call.outcome.drafted[0] for call in read_calls(path) if isinstance(call, ObserveCall)}
    assert len(lengths) > 2
    assert any(call.drafts.signal for call in read_calls(path) if isinstance(call, TrimCall))


def test_heuristic_lengths_are_those_of_transformers(decoder: Models, tmp_path: Path) -> None:
    """Two more after a draft that was accepted whole, else one less; and the next text goes on from there."""
    with Session(decision_log=tmp_path / "log.jsonl") as session:
        for _ in range(2):
            ours(decoder, {"policy": "heuristic", "num_assistant_tokens": 3}, session=session)
    k, steps = 3, 0
    for call in read_calls(tmp_path / "log.jsonl"):
        if isinstance(call, PlanCall):
            assert call.plan.depth[0] == min(k, call.view.room_depth[0])
            steps += 1
        elif isinstance(call, ObserveCall):
            ended, drafted = call.outcome.ended[0], call.outcome.drafted[0]
            k = k + 2 if ended == "all_accepted" and drafted == k else max(1, k - 1) if ended == "rejected" else k
    assert steps > 10


def test_sessions_are_kept_for_the_next_call(decoder: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scripted(monkeypatch, [2])
    options: dict[str, Any] = {"assistant_model": decoder.assistant, **GREEDY}
    generate(decoder.target, decoder.inputs, speculative_config={"num_assistant_tokens": 7}, **options)
    generate(decoder.target, decoder.inputs, speculative_config={"num_assistant_tokens": 7}, **options)
    assert len(made) == 1
    assert made[0].forgotten == ["generate-0", "generate-1"]
    generate(decoder.target, decoder.inputs, speculative_config={"num_assistant_tokens": 6}, **options)
    assert len(made) == 2


@pytest.mark.parametrize("call", ["plan", "trim", "observe"])
def test_a_controller_that_fails_costs_no_request(
    decoder: Models, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scripted(monkeypatch, [3], fails_at=4, fails_in=call)
    with caplog.at_level(logging.ERROR, logger="dynaspec"):
        output, counts = ours(decoder, {"policy": "constant", "num_assistant_tokens": 2})
    assert torch.equal(output, plain(decoder))
    assert sum("the controller failed" in record.message for record in caplog.records) == 1
    assert counts.drafts > 6  # it goes on, with 2 tokens


def test_a_streamer_that_raises_leaves_the_session_fit(decoder: Models) -> None:
    class Broken:
        def put(self, value: torch.Tensor) -> None:
            if value.numel() < decoder.inputs.numel():
                raise OSError("closed")

        def end(self) -> None:
            """Nothing."""

    session = Session()
    with pytest.raises(OSError, match="closed"):
        ours(decoder, session=session, streamer=Broken())
    output, _ = ours(decoder, session=session)
    assert torch.equal(output, plain(decoder))


def test_models_are_left_as_they_were(decoder: Models) -> None:
    before = [
        (type(model), dict(vars(model)), model.generation_config.to_dict())
        for model in (decoder.target, decoder.assistant)
    ]
    ours(decoder)
    after = [
        (type(model), dict(vars(model)), model.generation_config.to_dict())
        for model in (decoder.target, decoder.assistant)
    ]
    assert before == after
