"""A simulated engine writes a decision log; the trace read from it is the simulated one, as far as it was seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynaspec import LLM, SamplingParams
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Controller, DraftView, Limits, SpecPlan, StepView
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from dynaspec.observe.decision_log import DecisionLog, LoggedController, PlanCall, TrimCall, read_calls, read_header
from dynaspec.simulate import traces as at
from dynaspec.simulate.recorded import load_trace, replay
from dynaspec.simulate.simulator import HostConfig, simulate
from dynaspec.simulate.traces import Lengths
from support.checkpoints import Pair
from support.workloads import PROMPTS
from unit.simulate.scenes import flat_costs, production, synthetic

HOST = HostConfig(max_num_seqs=4)


def logged(path, trace, **keys):
    log = DecisionLog(path)
    simulate(
        trace,
        at.rollout(len(trace)),
        flat_costs(),
        lambda limits: LoggedController(production(**keys)(limits), log),
        HOST,
    )
    log.close()


def by_prompt(trace):
    """Requests in an order that does not depend on who was seen first."""
    return trace.take(np.argsort(trace.prompt, kind="stable"))


def test_long_drafts_give_the_trace_back(tmp_path):
    trace = synthetic(30, 0.5, prompt=Lengths(150, 0.4), output=Lengths(40), max_tokens=500, concentration=1e6)
    trace = trace.take(np.unique(trace.prompt, return_index=True)[1])
    logged(tmp_path / "log", trace, num_speculative_tokens=16, policy="constant")
    read = by_prompt(load_trace(tmp_path / "log", np.random.default_rng(0)))
    for column in ("prompt", "output", "max_tokens"):
        assert np.array_equal(getattr(read, column), getattr(trace, column)), column
    # No draft of 16 was accepted whole, so every position behind the first was tested.
    behind = np.arange(len(trace.runs)) - np.repeat(trace.first, trace.output) > 0
    assert np.array_equal(read.runs[behind], trace.runs[behind])
    size = len(trace.runs)
    assert read.confidence[:size][behind] == pytest.approx(trace.confidence[:size][behind])


def test_what_was_not_seen_is_filled_in_at_the_request_s_rate(tmp_path):
    trace = synthetic(200, 0.7, output=Lengths(60))
    logged(tmp_path / "log", trace, num_speculative_tokens=1, policy="constant")
    read = load_trace(tmp_path / "log", np.random.default_rng(0))
    assert read.survival(3) == pytest.approx(trace.survival(3), abs=0.03)


def test_a_log_without_drafts(tmp_path):
    logged(tmp_path / "log", synthetic(3))
    with pytest.raises(ConfigError, match="no draft was verified"):
        load_trace(tmp_path / "log", np.random.default_rng(0))


def test_a_log_of_another_version(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"format": "dynaspec-decision-log", "version": 999}\n')
    with pytest.raises(ConfigError, match="version"):
        load_trace(path, np.random.default_rng(0))


PROFILE = Path(__file__).parents[1] / "control" / "online_profile.json"
CONFIGS: dict[str, dict[str, Any]] = {
    "constant": {"policy": "constant", "num_speculative_tokens": 4},
    "heuristic": {"policy": "heuristic", "num_speculative_tokens": 3},
    "confidence_auto": {"draft_confidence_threshold": "auto", "num_speculative_tokens": 8},
    "off_switch": {"policy": "heuristic", "num_speculative_tokens": 4, "disable_by_batch_size": 2},
    "schedule": {"num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 8, 2]], "num_speculative_tokens": 5},
    "goodput": {"dynamic_config_path": str(PROFILE), "num_speculative_tokens": 5},
    "elastic": {"draft_length_options": [2, 4, 8], "kv_write_gating_threshold": 0.3},
    "auto": {"policy": "auto", "num_speculative_tokens": 6, "prompt_lookup_max": 0},
    "auto_by_itself": {"policy": "auto", "num_speculative_tokens": 6},
    "auto_routed": {"policy": "auto", "num_speculative_tokens": 6, "prompt_lookup_max": 3},
}
PARAMS = [SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=10 + 6 * i) for i in range(len(PROMPTS))]


def decode(pair: Pair, path: Path, keys: dict[str, Any], *, overlapped: bool) -> None:
    """Decodes some prompts, four at a time, with a log of what the controller decides."""
    config = {"method": "draft_model", "model": pair.drafter, **keys}
    llm = LLM(
        pair.target, speculative_config=config, max_num_seqs=4, async_scheduling=overlapped, decision_log=str(path)
    )
    try:
        llm.generate(list(PROMPTS), PARAMS)
        assert not llm.stats().proposer_faults
    finally:
        llm.close()


def fresh(path: Path, **changes: Any) -> Controller:
    """The controller that a log's header describes, with some keys changed."""
    header = read_header(path)
    config = SpeculativeConfig.parse({**header.speculative_config, **changes}, {})
    limits = next(call.view.limits for call in read_calls(path) if isinstance(call, PlanCall))
    options = {} if header.costs is None else {"costs": header.costs}
    return build_controller(config, limits, **options)


@pytest.fixture(scope="module")
def recorded(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "log.jsonl"
    decode(tiny, path, CONFIGS["confidence_auto"], overlapped=False)
    return path


@pytest.mark.parametrize("overlapped", [False, True], ids=["serial", "async"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_controller_decides_alike(tiny: Pair, tmp_path: Path, name: str, overlapped: bool) -> None:
    path = tmp_path / "log.jsonl"
    decode(tiny, path, CONFIGS[name], overlapped=overlapped)
    result = replay(path, fresh(path))
    assert result.first is None, str(result.first)
    assert result.identical
    assert result.plans >= result.trims > 20


def test_a_log_of_auto_holds_evidence(tiny: Pair, tmp_path: Path) -> None:
    """Else replaying one does not show that it comes back; and it is more than the confidences say."""
    path = tmp_path / "log.jsonl"
    decode(tiny, path, CONFIGS["auto"], overlapped=False)
    trims = [call.drafts for call in read_calls(path) if isinstance(call, TrimCall)]
    assert any(any(drafts.signal) for drafts in trims)
    apart = [
        abs(e - math.log(c / (1 - c)))
        for drafts in trims
        for said, known in zip(drafts.confidence, drafts.signal, strict=bool(drafts.signal))
        for c, e in zip(said, known, strict=True)
        if 0.0 < c < 1.0
    ]
    assert max(apart) > 0.1


def test_an_asynchronous_log_has_late_outcomes(tiny: Pair, tmp_path: Path) -> None:
    """Else the test above says nothing about them."""
    path = tmp_path / "log.jsonl"
    decode(tiny, path, CONFIGS["heuristic"], overlapped=True)
    kinds = [type(call).__name__ for call in read_calls(path)]
    planned = [i for i, kind in enumerate(kinds) if kind == "PlanCall"]
    assert any("ObserveCall" not in kinds[first:second] for first, second in pairwise(planned))


@pytest.mark.parametrize(
    "changes",
    [{"num_speculative_tokens": 7}, {"draft_confidence_threshold": 0.3}, {"draft_confidence_scope": "request"}],
    ids=str,
)
def test_another_configuration_is_found_out(recorded: Path, changes: dict[str, Any]) -> None:
    result = replay(recorded, fresh(recorded, **changes))
    assert not result.identical
    assert 0 < result.different <= result.plans + result.trims


class Once(LoggedController):
    """Answers otherwise in one step."""

    def __init__(self, inner: Controller, step: int, *, trims: bool) -> None:
        self.inner, self.step, self.trims = inner, step, trims

    def plan(self, view: StepView) -> SpecPlan:
        plan = self.inner.plan(view)
        return replace(plan, verify_nodes=0) if view.step == self.step and not self.trims else plan

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        trimmed = self.inner.trim(view, plan, drafts)
        return replace(trimmed, verify_nodes=0) if view.step == self.step and self.trims else trimmed

    def observe(self, outcome: Any) -> None:
        self.inner.observe(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        self.inner.forget(ids)


@pytest.mark.parametrize("trims", [False, True])
def test_a_single_difference_is_named(recorded: Path, trims: bool) -> None:
    result = replay(recorded, Once(fresh(recorded), 9, trims=trims))
    assert result.different == 1
    assert result.first is not None
    assert (result.first.step, result.first.call) == (9, "trim" if trims else "plan")
    line = recorded.read_text("ascii").splitlines()[result.first.line - 1]
    assert '"step":9' in line
    assert f'"call":"{result.first.call}"' in line
    assert "verify_nodes was None and is 0" in str(result.first)


def test_what_was_learnt_matters(recorded: Path) -> None:
    """The threshold is fitted to outcomes: without them the plans differ."""

    class Deaf(Once):
        def observe(self, outcome: Any) -> None:
            """Learns nothing."""

    assert not replay(recorded, Deaf(fresh(recorded), -1, trims=False)).identical


def test_a_log_without_steps(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    DecisionLog(path).close()
    result = replay(path, build_controller(None, Limits((0,))))
    assert (result.plans, result.trims, result.identical) == (0, 0, True)


def test_a_malformed_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1"):
        replay(path, build_controller(None, Limits((0,))))
