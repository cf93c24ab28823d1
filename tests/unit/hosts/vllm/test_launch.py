"""dynaspec's arguments as vLLM's. What vLLM itself would say is told by ``tests/hosts/vllm``."""

from __future__ import annotations

from typing import Any

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.keys import REFUSED
from dynaspec.hosts.vllm import launch
from dynaspec.hosts.vllm.launch import POLICY_KEYS, SCHEDULER, VLLM_KEYS, divide, engine_arguments, require_vllm


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is installed must not matter."""
    monkeypatch.setattr(launch, "find_spec", lambda name: None)


def arguments(speculative_config: Any, environ: dict[str, str] | None = None, /, **options: Any) -> dict[str, Any]:
    return engine_arguments("m", speculative_config, options, environ or {})


def settings(speculative_config: Any, environ: dict[str, str] | None = None, /, **options: Any) -> dict[str, Any]:
    return arguments(speculative_config, environ, **options)["additional_config"]["dynaspec"]


def test_without_speculation_vllm_is_as_it_always_is() -> None:
    assert arguments(None, dtype="float32", quantization="awq", max_num_seqs=4) == {
        "model": "m",
        "dtype": "float32",
        "quantization": "awq",
        "max_num_seqs": 4,
    }


def test_a_draft_model_under_auto() -> None:
    told = arguments({"model": "d"}, tensor_parallel_size=2)
    table = told["speculative_config"].pop("num_speculative_tokens_per_batch_size")
    assert told == {
        "model": "m",
        "tensor_parallel_size": 2,
        "speculative_config": {"model": "d", "num_speculative_tokens": 16},
        "scheduler_cls": SCHEDULER,
        "additional_config": {"dynaspec": {"policy": "auto"}},
    }
    assert [k for _, _, k in table] == [16, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert [(low, high) for low, high, _ in table] == [(n, n) for n in range(1, 13)]


@pytest.mark.parametrize("given", [{"model": "[ngram]"}, {"method": "[ngram]"}, '{"prompt_lookup_max": 5}'])
def test_prompt_lookup_by_any_of_its_names(given: Any) -> None:
    told = arguments(given)["speculative_config"]
    assert (told["method"], told["num_speculative_tokens"], "model" in told) == ("ngram", 16, False)


def test_an_object_says_the_same_as_its_keys() -> None:
    keys = {"model": "d", "policy": "constant", "num_speculative_tokens": 3, "draft_sample_method": "greedy"}
    by_object, by_keys = arguments(SpeculativeConfig(**keys)), arguments(keys)
    assert by_object.pop("speculative_config") == by_keys.pop("speculative_config") | {"method": "draft_model"}
    assert by_object == by_keys


def test_policies_go_to_the_scheduler_and_drafters_to_vllm() -> None:
    ranges = [[1, 4, 9], [5, 8, 3]]
    told = arguments(
        {
            "model": "d",
            "revision": "r",
            "num-speculative-tokens-per-batch-size": ranges,
            "disable_by_batch_size": 32,
            "draft_tensor_parallel_size": 1,
            "speculative_model_quantization": "fp8",
        },
        decision_log="log.jsonl",
        additional_config={"other": 1},
    )
    table = told["speculative_config"].pop("num_speculative_tokens_per_batch_size")
    assert {9, 3, 0} <= {k for _, _, k in table}
    assert told["speculative_config"] == {
        "model": "d",
        "revision": "r",
        "num_speculative_tokens": 9,
        "draft_tensor_parallel_size": 1,
        "quantization": "fp8",
    }
    assert told["additional_config"]["other"] == 1
    assert told["additional_config"]["dynaspec"] == {
        "policy": "schedule",
        "num_speculative_tokens_per_batch_size": ranges,
        "disable_by_batch_size": 32,
        "decision_log": "log.jsonl",
    }


def test_heuristics_start_where_they_are_told_and_may_grow() -> None:
    told = arguments({"model": "d", "policy": "heuristic", "num_speculative_tokens": 4})
    assert told["speculative_config"]["num_speculative_tokens"] == 16
    assert told["additional_config"]["dynaspec"] == {"policy": "heuristic", "num_speculative_tokens": 4}


def test_a_tree_of_width_1_is_a_chain() -> None:
    assert arguments({"model": "d", "tree_width": 1}) == arguments({"model": "d"})


@pytest.mark.parametrize(("asked", "told"), [(True, {"use_heterogeneous_vocab": True}), (False, {})])
def test_another_vocabulary_is_vllm_s_to_translate(asked: bool, told: dict[str, bool]) -> None:
    found = arguments({"model": "d", "use_heterogeneous_vocab": asked})["speculative_config"]
    assert {key: value for key, value in found.items() if "vocab" in key} == told


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "deepseek_mtp", "medusa", "dflash"])
def test_methods_that_vllm_alone_has(method: str) -> None:
    told = arguments({"method": method, "model": "d", "num_speculative_tokens": 3, "parallel_drafting": False})
    assert told["speculative_config"].items() >= {"method": method, "model": "d", "num_speculative_tokens": 3}.items()
    assert told["speculative_config"]["parallel_drafting"] is False
    lengths = told["speculative_config"].get("num_speculative_tokens_per_batch_size")
    assert (lengths is None) == (method == "medusa")


def test_a_length_that_the_drafter_s_checkpoint_says() -> None:
    assert arguments({"method": "mtp"})["speculative_config"] == {"method": "mtp"}


def test_ranks_that_must_draft_alike_have_no_table() -> None:
    told = arguments({"model": "d"}, data_parallel_size=2)
    assert "num_speculative_tokens_per_batch_size" not in told["speculative_config"]


def test_block_verification_is_left_to_vllm() -> None:
    told = arguments({"model": "d", "rejection_sample_method": "block"})
    assert told["speculative_config"]["rejection_sample_method"] == "block"


def test_the_environment_decides_what_is_open() -> None:
    environ = {"VLLM_SPEC_ADAPTIVE_DRAFT_LENGTH": "1"}
    assert settings({"model": "d"}, environ)["policy"] == "elastic"
    assert settings({"model": "d", "policy": "constant"}, environ)["policy"] == "constant"
    assert settings({"method": "eagle", "num_speculative_tokens": 4}, environ)["policy"] == "elastic"


def test_vllm_s_short_options() -> None:
    told = arguments(None, spec_method="ngram", spec_tokens=4)
    assert told["speculative_config"]["num_speculative_tokens"] == 4
    assert "spec_method" not in told
    with pytest.raises(ConfigError, match="spec_tokens was given together with speculative_config"):
        arguments({"model": "d"}, spec_tokens=4)


def test_options_under_other_names() -> None:
    assert arguments(None, kv_cache_memory=2**30, device="auto") == {"model": "m", "kv_cache_memory_bytes": 2**30}


@pytest.mark.parametrize(
    ("speculation", "options", "words"),
    [
        ({"modell": "d"}, {}, "no key 'modell'; did you mean model"),
        ("{", {}, "not JSON"),
        (3, {}, "expected a mapping"),
        ({"model": "d", "prompt_lookup_max": 3}, {}, "vLLM has one drafter"),
        ({"model": "d", "dtype": "float16"}, {}, "expected 'auto', as vLLM's drafter has the target's dtype"),
        (
            {"model": "d", "use_heterogeneous_vocab": "slem"},
            {},
            "use_heterogeneous_vocab is 'slem', which vLLM does not",
        ),
        ({"assistant_early_exit": 2}, {}, "method is 'early_exit', which vLLM does not have"),
        ({"model": "d", "tree_width": 3}, {}, "tree_width is 3, but vLLM verifies chains only; expected no tree_width"),
        (
            {"method": "eagle3", "model": "d", "speculative_token_tree": "[(0,), (1,)]", "drafter_backend": "vllm"},
            {},
            "speculative_token_tree is '[(0,), (1,)]', but vLLM verifies chains only",
        ),
        ({"model": "d", "num_speculative_tokens": 0}, {}, "num_speculative_tokens is 0"),
        ({"model": "d", "policy": "heuristc"}, {}, "policy is 'heuristc'"),
        ({"method": "eagle", "model": "d", "num_speculative_tokens": 4, "policy": "x"}, {}, "policy is 'x'"),
        ({"model": "d", "draft_confidence_threshold": 0.4}, {}, "cannot stop between draft passes"),
        ({"model": "d", "kv_write_gating_threshold": 0.4}, {}, "cannot leave out KV writes"),
        ({"model": "d"}, {"scheduler_cls": "a.B"}, "scheduler_cls is 'a.B'"),
        ({"model": "d"}, {"additional_config": {"dynaspec": {}}}, "additional_config has the key 'dynaspec'"),
        ({"model": "d"}, {"device": "cuda"}, "device is 'cuda'; expected 'auto'"),
        (None, {"decision_log": "x"}, "nothing speculates"),
    ],
)
def test_what_cannot_work_is_one_sentence(speculation: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arguments(speculation, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_vllm_s_fields_are_looked_at_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"EngineArgs": {"model", "enforce_eager"}, "SpeculativeConfig": {"brand_new"}}
    monkeypatch.setattr(launch, "_field_names", lambda module, cls: frozenset(fields[cls]))
    assert arguments(None, enforce_eager=True)["enforce_eager"]
    assert arguments({"model": "d", "brand_new": 1})["speculative_config"]["brand_new"] == 1
    with pytest.raises(ConfigError, match="unknown option 'enforce_eagr' for vLLM; did you mean 'enforce_eager'"):
        arguments(None, enforce_eagr=True)


def test_without_vllm_its_installation_is_named() -> None:
    with pytest.raises(ConfigError, match="pip install vllm"):
        require_vllm()


def test_every_key_has_one_reader() -> None:
    fields = set(SpeculativeConfig.model_fields)
    assert POLICY_KEYS - {"num_assistant_tokens_schedule"} <= fields
    assert not VLLM_KEYS & fields
    assert REFUSED.keys() >= VLLM_KEYS


def test_none_asks_for_nothing() -> None:
    assert divide({"model": "d", "quantization": None, "policy": None}, {}) == divide({"model": "d"}, {})
