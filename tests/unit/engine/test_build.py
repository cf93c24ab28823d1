"""What an engine is put together from, as its configuration says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dynaspec import SamplingParams
from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.engine.build import build_engine
from dynaspec.engine.config import EngineConfig
from dynaspec.observe.decision_log import read_header, read_log
from support.checkpoints import Pair
from support.engines import kv_bytes, open_llm
from support.state_heads import FittedHeads

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.mark.parametrize(
    ("speculation", "names"),
    [
        ({}, ["draft_model", "ngram"]),
        ({"prompt_lookup_max": 0}, ["draft_model"]),
        ({"prompt_lookup_max": 3, "policy": "auto"}, ["draft_model", "ngram"]),
        ({"model": "[ngram]", "prompt_lookup_max": 3}, ["ngram"]),
        ({"model": None, "method": "suffix"}, ["suffix"]),
        ({"suffix_decoding_max_tree_depth": 8}, ["draft_model", "suffix"]),
        ({"suffix_decoding_max_tree_depth": 8, "prompt_lookup_max": 3}, ["draft_model", "ngram", "suffix"]),
    ],
)
def test_a_step_knows_its_proposers_in_order(tiny: Pair, tmp_path: Path, speculation: Any, names: list[str]) -> None:
    path = tmp_path / "log.jsonl"
    speculation = {"model": tiny.drafter, "num_speculative_tokens": 3} | speculation
    with open_llm(tiny.target, speculative_config=speculation, decision_log=str(path)) as llm:
        llm.generate(["1 2 3 4"], GREEDY)
        configured = llm.config.speculative_config
    limits = next(iter(read_log(path))).view.limits
    assert [proposer.name for proposer in limits.proposers] == names
    assert limits.can_gate == ("draft_model" in names)
    assert SpeculativeConfig.parse(read_header(path).speculative_config) == configured


def test_costs_are_measured_once_nothing_is_compiled_beside(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr("dynaspec.engine.build.compile_worker.wait", lambda: done.append("waited"))
    monkeypatch.setattr("dynaspec.engine.build.measure_costs", lambda *_: done.append("measured") or PassCosts())
    with open_llm(tiny.target, speculative_config={"model": tiny.drafter, "policy": "auto"}):
        assert done == ["waited", "measured"]


def test_costs_are_measured_for_auto_alone(tiny: Pair, tmp_path: Path) -> None:
    found = {}
    for policy in ("auto", "constant"):
        path = tmp_path / policy
        speculation: dict[str, Any] = {"model": tiny.drafter, "policy": policy}
        if policy == "auto":
            speculation["prompt_lookup_max"] = 3
        with open_llm(tiny.target, speculative_config=speculation, decision_log=str(path), seed=5):
            pass
        header = read_header(path)
        assert header.seed == 5
        found[policy] = header.costs
    assert found["constant"] == PassCosts()
    costs = found["auto"]
    assert costs is not None
    assert costs.target[0][0] == costs.drafters[0][0][0] == 1
    assert all(seconds > 0 for curve in (costs.target, *costs.drafters) for _, seconds in curve)
    assert costs.drafters[1] == ()


@pytest.mark.parametrize(("method", "first"), [("medusa", 3), ("mlp_speculator", 1)])
def test_heads_without_kv_are_measured_too(
    method: str, first: int, tiny: Pair, fitted_state_heads: dict[str, FittedHeads], tmp_path: Path
) -> None:
    """All of Medusa's are one pass, which gives a row three tokens."""
    path = tmp_path / "log.jsonl"
    speculation = {"model": fitted_state_heads[method].path}
    with open_llm(tiny.target, speculative_config=speculation, decision_log=str(path)) as llm:
        llm.generate(["1 2 3 4"], GREEDY)
    costs = read_header(path).costs
    assert costs is not None
    assert costs.drafters[0][0][0] == first
    assert costs.first_s[0] > costs.first_s[1] == 0.0
    limits = next(iter(read_log(path))).view.limits
    assert [(proposer.name, proposer.longest) for proposer in limits.proposers] == [(method, 3), ("ngram", None)]
    assert limits.draft_lens[-1] == 16
    assert not limits.can_gate


def test_a_log_that_cannot_be_written_is_an_error(tiny: Pair, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="decision log"),
        open_llm(tiny.target, decision_log=str(tmp_path / "none" / "log.jsonl")),
    ):
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({}, 10),
        ({"kv_cache_dtype": "bfloat16"}, 20),
        ({"dtype": "bfloat16"}, 20),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, 10),
        ({"quantization": "int4"}, 20),
        ({"quantization": "int8", "kv_cache_dtype": "float32"}, 10),
        ({"dtype": "float16"}, 20),
    ],
    ids=str,
)
def test_a_kv_cache_in_16_bits_has_twice_the_blocks(options: dict[str, str], blocks: int, tiny: Pair) -> None:
    config = EngineConfig.build(
        model=tiny.target,
        speculative_config={"model": tiny.drafter},
        kv_cache_memory=kv_bytes(10, tiny.target, tiny.drafter),
        **options,
    )
    engine = build_engine(config)
    assert engine.snapshot().kv_blocks == blocks
    engine.close()


@pytest.mark.parametrize("wanted", ["bfloat16", "float32"])
def test_a_kv_cache_of_a_model_in_float16_is_in_float16(wanted: str, tiny: Pair) -> None:
    words = f"kv_cache_dtype is {wanted!r} but the model is in float16 on cpu; expected 'auto'"
    with pytest.raises(ConfigError, match=words):
        open_llm(tiny.target, dtype="float16", kv_cache_dtype=wanted).__enter__()


def test_synthetic_acceptance_says_so(tiny: Pair, caplog: pytest.LogCaptureFixture) -> None:
    speculation = {
        "model": tiny.drafter,
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0],
        "policy": "constant",
    }
    caplog.set_level(logging.WARNING)
    with open_llm(tiny.target, speculative_config=speculation) as llm:
        assert [r.levelname for r in caplog.records if "SYNTHETIC" in r.getMessage()] == ["WARNING"]
        llm.generate(["1 2 3 4"], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        stats = llm.stats()
        assert stats.accepted == stats.verified > 0
