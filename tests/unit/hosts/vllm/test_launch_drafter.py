"""Who drafts under vLLM, and what it is told where that is dynaspec's drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from dynaspec.hosts.vllm import launch
from dynaspec.hosts.vllm.launch import SCHEDULER, engine_arguments
from dynaspec.hosts.vllm.settings import DRAFTER, DrafterSettings, Settings, VllmSpeculation
from dynaspec.hosts.vllm.step_tracker import Row, StepTracker

PROFILE = Path(__file__).resolve().parents[2] / "control" / "h100_profile.json"
OWN = {"drafter_backend": "dynaspec"}


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)


def arguments(speculation: Any, **options: Any) -> dict[str, Any]:
    return engine_arguments("target", speculation, options, {})


def drafts_itself(speculation: Any, **options: Any) -> bool:
    return bool(arguments(speculation, **options)["speculative_config"].get("model") == DRAFTER)


@pytest.mark.parametrize(
    ("on_cpu", "speculation", "options", "own"),
    [
        (True, {"model": "d"}, {}, True),
        (True, {"method": "ngram"}, {}, True),
        (True, '{"model": "d", "drafter-backend": "auto"}', {}, True),
        (True, SpeculativeConfig(method="draft_model", model="d"), {}, True),
        (True, {"model": "d"}, {"tensor_parallel_size": 2}, False),
        (True, {"model": "d"}, {"pipeline_parallel_size": 2}, False),
        (True, {"model": "d"}, {"data_parallel_size": 2}, False),
        (True, {"model": "d", "quantization": "fp8"}, {}, False),
        (True, {"model": "d", "quantization": "int8"}, {}, True),
        (True, {"method": "eagle", "model": "d", "num_speculative_tokens": 3}, {}, False),
        (True, {"model": "d", "draft_sample_method": "probabilistic"}, {}, False),
        (True, {"model": "d", "drafter_backend": "vllm"}, {}, False),
        (False, {"model": "d"}, {}, False),
        (False, {"model": "d"} | OWN, {}, True),
    ],
)
def test_the_choice(
    on_cpu: bool, speculation: Any, options: dict[str, Any], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_on_cpu", lambda: on_cpu)
    assert drafts_itself(speculation, **options) == own


def test_what_vllm_is_told() -> None:
    told = arguments({"model": "d", "policy": "constant", "num_speculative_tokens": 3} | OWN, decision_log="log")
    assert told["speculative_config"] == {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 3}
    assert told["scheduler_cls"] == SCHEDULER
    own = told["additional_config"]["dynaspec"]
    assert (own["model"], own["policy"], own["decision_log"]) == ("d", "constant", "log")


@pytest.mark.parametrize(
    "policy",
    [
        {"policy": "auto"},
        {"policy": "auto", "prompt_lookup_max": 0},
        {"policy": "constant", "num_speculative_tokens": 2},
        {"policy": "heuristic"},
        {"policy": "heuristic_transient", "num_speculative_tokens": 3},
        {"policy": "confidence", "draft_confidence_threshold": 0.4},
        {"num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 64, 2]]},
        {"policy": "goodput", "dynamic_config_path": str(PROFILE)},
        {"policy": "elastic", "kv_write_gating_threshold": 0.3},
        {"disable_by_batch_size": 32},
        {"quantization": "int8"},
    ],
    ids=lambda policy: next(iter(policy.values())) if "policy" in policy else next(iter(policy)),
)
def test_the_drafter_understands_what_it_is_told(policy: dict[str, Any]) -> None:
    given = {"model": "d", **policy}
    told = arguments(given | OWN)
    longest = told["speculative_config"]["num_speculative_tokens"]
    settings = DrafterSettings.read(told["additional_config"]["dynaspec"], longest, {})
    wanted = SpeculativeConfig(**given, draft_sample_method="greedy")
    assert settings.config.model_dump() == wanted.model_dump()
    assert longest >= settings.config.num_speculative_tokens
    if settings.config.policy.startswith("heuristic"):
        assert longest == 16  # they grow


def test_how_drafts_are_tested_is_vllm_s_business() -> None:
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    told = arguments({"model": "d", **synthetic, **OWN})
    assert told["speculative_config"].items() >= synthetic.items()
    own = told["additional_config"]["dynaspec"]
    assert not own.keys() & synthetic.keys()
    read = DrafterSettings.read(own, told["speculative_config"]["num_speculative_tokens"], {})
    assert (read.config.policy, read.config.hybrid_lookup) == ("auto", False)  # rates are one drafter's
    block = arguments({"model": "d", "rejection_sample_method": "block", **OWN})
    assert block["speculative_config"]["rejection_sample_method"] == "block"


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ({"model": "d", "drafter_backend": "cuda"}, {}, "drafter_backend is 'cuda'; expected one of 'auto'"),
        ({"assistant_early_exit": 2, **OWN}, {}, "method is 'early_exit', which vLLM does not have"),
        ({"method": "eagle", "model": "d", **OWN}, {}, "method is 'eagle' and drafter_backend is 'dynaspec'"),
        ({"model": "d", "quantization": "fp8", **OWN}, {}, "quantization is given and drafter_backend is 'dynaspec'"),
        ({"model": "d", "quantization": "int8"}, {}, "quantization is 'int8', which vLLM's drafters do not have"),
        ({"model": "d", **OWN}, {"tensor_parallel_size": 2}, "vLLM runs 2 workers; expected one"),
        ({"model": "d", "draft_sample_method": "probabilistic", **OWN}, {}, "draft_sample_method is 'probabilistic'"),
        ({"model": "d", "polcy": "auto", **OWN}, {}, "speculative_config has no key 'polcy'"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        arguments(given, **options)
    assert words in str(refused.value)


def test_the_scheduler_beside_it_only_cuts() -> None:
    told = arguments({"model": "d", "policy": "confidence", "num_speculative_tokens": 9} | OWN, decision_log="log")
    host = VllmSpeculation("custom_class", longest=9, model=DRAFTER, on_cpu=True)
    settings = Settings.read(told["additional_config"]["dynaspec"], host, {})
    assert (settings.config.policy, settings.config.num_speculative_tokens) == ("constant", 9)
    assert (settings.policy, settings.decision_log, settings.fixed) == ("confidence", None, None)
    assert not settings.alike
    assert not settings.drafter.runs_model
    with pytest.raises(ConfigError, match="vLLM runs 2 workers"):
        Settings.read(told["additional_config"]["dynaspec"], VllmSpeculation("c", 9, model=DRAFTER, ranks=2), {})


@pytest.mark.parametrize(
    ("environ", "policy"),
    [
        ({"VLLM_SPEC_ADAPTIVE_DRAFT_LENGTH": "1"}, "elastic"),
        ({"DYNASPEC_CONFIDENCE_THRESHOLD": "0.4"}, "confidence"),
        ({}, "auto"),
    ],
)
def test_the_environment_decides_once(environ: dict[str, str], policy: str) -> None:
    """What the launch has decided is not decided otherwise where the worker runs."""
    told = engine_arguments("target", {"model": "d"} | OWN, {}, environ)
    longest = told["speculative_config"]["num_speculative_tokens"]
    for there in ({}, environ, {"VLLM_SPEC_ADAPTIVE_DRAFT_LENGTH": "1"}):
        settings = DrafterSettings.read(told["additional_config"]["dynaspec"], longest, there)
        assert settings.config.policy == policy


@pytest.mark.parametrize("longest", [0, 65])
def test_the_drafter_refuses_lengths_that_cannot_be(longest: int) -> None:
    with pytest.raises(ConfigError, match=f"^vLLM's num_speculative_tokens is {longest}; expected"):
        DrafterSettings.read({"model": "d"}, longest, {})


def test_without_vllm_s_room_for_it_no_draft_is_as_long() -> None:
    assert DrafterSettings.read({"model": "d"}, 3, {}).config.num_speculative_tokens == 3
    with pytest.raises(ConfigError, match=r"^num_speculative_tokens is 4 but vLLM's speculative_config says 3"):
        DrafterSettings.read({"model": "d", "num-speculative-tokens": 4}, 3, {})


def test_the_scheduler_plans_the_longest_draft_but_for_wishes_and_the_model_s_end() -> None:
    host = VllmSpeculation("custom_class", longest=5, model=DRAFTER, on_cpu=True)
    settings = Settings.read({"model": "d", "policy": "auto"}, host, {})
    controller = build_controller(settings.config, settings.limits)
    tracker = StepTracker(controller, settings.drafter, settings.limits)
    rows = [
        Row("a", 1, 0, 20, True, True, 22, room=50),
        Row("b", 1, 0, 20, True, True, 22, room=50, max_draft=2),
        Row("c", 1, 0, 20, True, True, 22, room=3),
        Row("d", 1, 0, 20, True, True, 22, room=50, max_draft=0),
    ]
    for _ in range(20):
        step = tracker.schedule(rows, 0, 0.0)
        assert dict(step.depths) == {"a": 5, "b": 2, "c": 3, "d": 0}
