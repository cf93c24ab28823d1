from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import Expected, SpeculativeConfig
from dynaspec.control.keys import ALIASES, REFUSED
from dynaspec.control.resolve import DEFAULT_POLICY, UNAVAILABLE_METHODS
from unit.control.seam import H100_PROFILE


def parse(value: Any) -> SpeculativeConfig:
    config = SpeculativeConfig.parse(value)
    assert config is not None
    return config


def draft(**keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig(model="drafter", **keys)


class TestDefaults:
    def test_a_model_is_a_draft_model(self) -> None:
        config = parse({"model": "drafter"})
        assert (config.method, config.num_speculative_tokens, config.policy) == (
            "draft_model",
            16,
            "auto",
        )
        assert config.draft_sample_method == "probabilistic"
        assert config.draft_confidence_threshold is None
        assert config.lookup == (4, 16)

    @pytest.mark.parametrize(
        "given",
        [
            {"method": "ngram"},
            {"model": "ngram"},
            {"model": "[ngram]"},
            {"method": "[ngram]"},
            {"prompt_lookup_max": 5},
        ],
    )
    def test_ways_to_say_ngram(self, given: dict[str, Any]) -> None:
        config = parse(given)
        assert (config.method, config.model) == ("ngram", None)
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == (5, 5)
        assert config.draft_sample_method == "greedy"

    @pytest.mark.parametrize(
        ("given", "bounds"),
        [
            ({"prompt_lookup_max": 4}, (4, 4)),
            ({"prompt_lookup_min": 2}, (2, 2)),
            ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
        ],
    )
    def test_one_lookup_bound_stands_for_both(self, given: dict[str, int], bounds: tuple[int, int]) -> None:
        config = parse(given)
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == bounds

    def test_a_threshold_makes_the_length_a_maximum_of_twenty(self) -> None:
        config = draft(draft_confidence_threshold=0.5)
        assert (config.policy, config.num_speculative_tokens) == ("confidence", 20)
        assert (config.draft_confidence_scope, config.signal) == ("batch_mean", "confidence")
        assert draft(draft_confidence_threshold=0.5, num_speculative_tokens=7).num_speculative_tokens == 7

    def test_the_confidence_policy_fits_its_threshold(self) -> None:
        assert draft(policy="confidence").draft_confidence_threshold == "auto"

    def test_a_threshold_of_zero_is_off(self) -> None:
        config = draft(draft_confidence_threshold=0.0)
        assert (config.policy, config.num_speculative_tokens) == (DEFAULT_POLICY, 16)

    @pytest.mark.parametrize(
        ("given", "policy", "longest"),
        [
            ({}, "auto", 16),
            ({"policy": "constant"}, "constant", 5),
            ({"policy": "heuristic"}, "heuristic", 5),
            ({"num_assistant_tokens_schedule": "constant"}, "constant", 5),
            ({"num_speculative_tokens_per_batch_size": [[1, 4, 6], [5, 9, 2]]}, "schedule", 6),
            ({"num_speculative_tokens_per_batch_size": [[1, 4, 0]]}, "schedule", 1),
            ({"dynamic_config_path": H100_PROFILE}, "goodput", 16),
            ({"dynamic_config_path": str(H100_PROFILE), "policy": "auto"}, "auto", 16),
            ({"draft_length_options": [3, 7]}, "elastic", 7),
            ({"policy": "elastic"}, "elastic", 15),
            ({"draft_confidence_threshold": 0.5, "dynamic_config_path": H100_PROFILE}, "goodput", 16),
            ({"draft_confidence_threshold": "auto", "draft_length_options": [3, 7]}, "elastic", 7),
            ({"draft_confidence_threshold": 0.5, "num_speculative_tokens_per_batch_size": [[1, 1, 2]]}, "schedule", 2),
            ({"kv_write_gating_threshold": 0.5}, "auto", 16),
        ],
        ids=str,
    )
    def test_keys_choose_a_policy_and_its_length(self, given: dict[str, Any], policy: str, longest: int) -> None:
        config = draft(**given)
        assert (config.policy, config.num_speculative_tokens) == (policy, longest)
        assert draft(**given, num_speculative_tokens=9).num_speculative_tokens == 9

    @pytest.mark.parametrize(("longest", "ladder"), [(15, (5, 10, 15)), (5, (2, 3, 5)), (2, (1, 2)), (1, (1,))])
    def test_a_ladder_left_open_comes_from_the_longest_draft(self, longest: int, ladder: tuple[int, ...]) -> None:
        config = draft(policy="elastic", draft_length_options=None, num_speculative_tokens=longest)
        assert config.draft_length_options == ladder

    def test_goodput_goes_no_further_than_its_profile(self) -> None:
        assert draft(dynamic_config_path=H100_PROFILE).longest_draft == 5
        assert draft(dynamic_config_path=H100_PROFILE, num_speculative_tokens=3).longest_draft == 3

    def test_lookup_beside_a_draft_model(self) -> None:
        config = draft(prompt_lookup_max=8)
        assert config.hybrid_lookup
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == (8, 8)
        assert draft(prompt_lookup_min=3).lookup == (3, 3)
        assert not SpeculativeConfig(method="ngram").hybrid_lookup

    def test_auto_looks_up_beside_the_model_unless_told_not_to(self) -> None:
        assert draft().hybrid_lookup
        off = draft(prompt_lookup_max=0)
        assert (off.hybrid_lookup, off.lookup) == (False, None)
        assert parse(off.model_dump(exclude_none=True)) == off
        assert parse(draft().model_dump(exclude_none=True)) == draft()
        assert not draft(rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.5]).hybrid_lookup

    @pytest.mark.parametrize("policy", ["constant", "heuristic", "confidence", "elastic"])
    def test_no_other_policy_looks_up_beside_a_model(self, policy: str) -> None:
        assert draft(policy=policy).lookup is None
        assert draft(policy=policy, prompt_lookup_max=0).lookup is None

    def test_none_means_not_given(self) -> None:
        assert parse({"model": "drafter", "policy": None, "num_speculative_tokens": None}) == draft()


class TestForms:
    def test_none_is_no_speculation(self) -> None:
        assert SpeculativeConfig.parse(None) is None

    def test_a_finished_configuration_is_returned_as_it_is(self) -> None:
        config = draft()
        assert SpeculativeConfig.parse(config) is config

    def test_json_and_dashes(self) -> None:
        text = json.dumps({"model": "drafter", "num-speculative-tokens": 3, "draft-confidence-threshold": "auto"})
        assert parse(text) == draft(num_speculative_tokens=3, draft_confidence_threshold="auto")

    @pytest.mark.parametrize(
        "config",
        [
            draft(),
            draft(policy="heuristic"),
            draft(assistant_confidence_threshold=0.3),
            draft(policy="elastic", kv_write_gating_threshold=0.5),
            draft(num_speculative_tokens_per_batch_size=[[1, 8, 4], [9, 32, 0]]),
            draft(dynamic_config_path=H100_PROFILE, draft_confidence_threshold="auto"),
            draft(policy="auto", dynamic_config_path=H100_PROFILE),
            draft(rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.5, 0.25]),
            draft(prompt_lookup_max=3),
            SpeculativeConfig(method="ngram"),
        ],
        ids=repr,
    )
    def test_it_survives_a_round_trip(self, config: SpeculativeConfig) -> None:
        assert parse(config.model_dump()) == config
        assert parse(config.model_dump_json()) == config

    def test_it_cannot_be_changed(self) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            draft().num_speculative_tokens = 3  # type: ignore[misc]

    def test_it_can_be_a_field_of_another_model(self) -> None:
        class Options(BaseModel):
            spec: SpeculativeConfig | None

        assert Options(spec=draft()).spec == draft()

    @pytest.mark.parametrize("value", ["[1]", "3", 3, ["model"]])
    def test_what_is_no_mapping_is_refused(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="expected a mapping"):
            SpeculativeConfig.parse(value)

    def test_what_is_no_json_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="'model=x', which is not JSON"):
            SpeculativeConfig.parse("model=x")


class TestAliases:
    def test_transformers_names(self) -> None:
        config = parse(
            {
                "speculative_model": "drafter",
                "num_assistant_tokens": 8,
                "num_assistant_tokens_schedule": "heuristic_transient",
            }
        )
        assert (config.method, config.model, config.num_speculative_tokens) == ("draft_model", "drafter", 8)
        assert config.policy == "heuristic_transient"

    def test_transformers_threshold_brings_its_signal(self) -> None:
        config = draft(assistant_confidence_threshold=0.4, num_assistant_tokens_schedule="constant")
        assert (config.policy, config.draft_confidence_threshold) == ("confidence", 0.4)
        assert (config.signal, config.draft_confidence_scope) == ("token_prob", "request")
        assert draft(assistant_confidence_threshold=0.4, signal="confidence").signal == "confidence"

    def test_vllms_former_names(self) -> None:
        config = parse(
            {
                "speculative_model": "[ngram]",
                "num_speculative_tokens": 5,
                "ngram_prompt_lookup_max": 4,
                "ngram_prompt_lookup_min": 2,
                "speculative_disable_by_batch_size": 8,
            }
        )
        assert (config.method, config.prompt_lookup_max, config.prompt_lookup_min) == ("ngram", 4, 2)
        assert config.disable_by_batch_size == 8

    def test_every_alias_leads_to_a_known_key(self) -> None:
        assert set(ALIASES.values()) <= set(SpeculativeConfig.model_fields) | set(REFUSED)

    def test_the_same_thing_said_twice(self) -> None:
        assert draft(num_speculative_tokens=3, num_assistant_tokens=3).num_speculative_tokens == 3
        with pytest.raises(ConfigError, match="num_speculative_tokens is 3 but num_assistant_tokens is 4"):
            draft(num_speculative_tokens=3, num_assistant_tokens=4)


class TestUnknownAndUnavailable:
    @pytest.mark.parametrize(
        ("key", "near"),
        [
            ("num_speculative_token", "num_speculative_tokens"),
            ("modle", "model"),
            ("prompt-lookup-mx", "prompt_lookup_max"),
            ("num_asistant_tokens", "num_assistant_tokens"),
        ],
    )
    def test_a_near_miss_is_pointed_out(self, key: str, near: str) -> None:
        with pytest.raises(ConfigError, match=f"no key '{key}'; did you mean .*{near}"):
            SpeculativeConfig(**{key: 1})

    def test_a_key_like_no_other_lists_the_keys(self) -> None:
        with pytest.raises(ConfigError, match=r"no key 'zzz'; expected keys among .*num_speculative_tokens"):
            draft(zzz=None)

    @pytest.mark.parametrize("method", UNAVAILABLE_METHODS)
    def test_a_method_to_come_is_refused_by_name(self, method: str) -> None:
        with pytest.raises(ConfigError, match=f"'{method}', which is not available in this version; .*'ngram'"):
            draft(method=method)

    @pytest.mark.parametrize("key", REFUSED)
    def test_a_key_without_use_here_is_refused_by_name(self, key: str) -> None:
        with pytest.raises(ConfigError, match=rf"^{key} is 'something'; expected .*no {key}: "):
            draft(**{key: "something"})

    @pytest.mark.parametrize(("key", "value"), [(k, v) for k, r in REFUSED.items() for v in (*r.harmless, None)])
    def test_a_value_that_asks_for_nothing_passes(self, key: str, value: object) -> None:
        assert draft(**{key: value}) == draft()

    def test_true_is_not_one(self) -> None:
        with pytest.raises(ConfigError, match="draft_tensor_parallel_size is True"):
            draft(draft_tensor_parallel_size=True)


class TestEarlyExit:
    def test_the_key_names_the_method(self) -> None:
        config = parse({"assistant_early_exit": 4})
        assert (config.method, config.model, config.assistant_early_exit) == ("early_exit", None, 4)
        assert config.draft_sample_method == "probabilistic"
        assert config.hybrid_lookup
        assert parse({"assistant_early_exit": 4, "policy": "elastic", "kv_write_gating_threshold": 0.5})

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"method": "early_exit"}, "method is 'early_exit' but there is no assistant_early_exit; expected one"),
            (
                {"method": "ngram", "assistant_early_exit": 4},
                "expected no assistant_early_exit, or method 'early_exit'",
            ),
            ({"model": "drafter", "assistant_early_exit": 4}, "4 but method is 'draft_model'"),
            ({"method": "early_exit", "model": "x", "assistant_early_exit": 4}, "model is 'x' .*expected no model, or"),
            ({"assistant_early_exit": 4, "dtype": "bfloat16"}, "dtype is 'bfloat16' but method is 'early_exit'"),
        ],
    )
    def test_what_contradicts_it(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            parse(given)


class TestOwnVocabulary:
    def test_its_keys(self) -> None:
        config = draft(use_heterogeneous_vocab=True, assistant_lookbehind=4)
        assert (config.use_heterogeneous_vocab, config.assistant_lookbehind) == (True, 4)
        assert draft(use_heterogeneous_vocab="slem", target_lookbehind=4).target_lookbehind == 4
        assert draft(use_heterogeneous_vocab=False) == draft()
        assert not parse({"method": "ngram", "use_heterogeneous_vocab": False}).use_heterogeneous_vocab

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"method": "ngram", "use_heterogeneous_vocab": True},
                "True but method is 'ngram'; .* method 'draft_model'",
            ),
            ({"model": "m", "assistant_lookbehind": 4}, "4 but use_heterogeneous_vocab is False; .* true"),
            (
                {"model": "m", "use_heterogeneous_vocab": True, "target_lookbehind": 4},
                "target_lookbehind is 4 but use_heterogeneous_vocab is True; .* use_heterogeneous_vocab 'slem'",
            ),
        ],
    )
    def test_what_contradicts_it(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            parse(given)


WRONG_VALUES = {
    "method": ["other", 3],
    "policy": ["", "fastest", ["constant"]],
    "num_speculative_tokens": [0, 65, -1, 2.5, 5.0, "5", True],
    "model": ["", 3],
    "revision": ["", 1],
    "max_model_len": [0, "9", True],
    "dtype": ["int4"],
    "quantization": ["fp8", 8, True],
    "use_heterogeneous_vocab": ["other", 1, 0.5],
    "assistant_lookbehind": [0, 2.5, "4", True],
    "target_lookbehind": [0, 2.5, "4", True],
    "assistant_early_exit": [0, 1.5, "2", True],
    "draft_sample_method": ["beam"],
    "disable_by_batch_size": [0, 1.5],
    "draft_confidence_threshold": [-0.1, 1.5, "high", float("nan"), True],
    "draft_confidence_scope": ["token"],
    "signal": ["survival"],
    "prompt_lookup_max": [0, 2.5],
    "prompt_lookup_min": [0],
    "suffix_decoding_max_tree_depth": [1, 2.5, "24", True],
    "suffix_decoding_max_cached_requests": [-1, 2.5, True],
    "suffix_decoding_max_cached_tokens": [-1, "many"],
    "suffix_decoding_max_spec_factor": [-0.5, float("inf"), "1", True],
    "suffix_decoding_min_token_prob": [-0.1, 1.1, float("nan"), True],
    "num_speculative_tokens_per_batch_size": [[], "[[1, 2, 3]]", 3, [[1, 2]], [[1, 2, 3.0]], [[1, True, 3]], {"1": 3}],
    "dynamic_config_path": ["", 3],
    "draft_length_options": [[], [0, 4], [4, 2], [4, 4], [4, 65], [4.0], "5, 10", 5, [True]],
    "kv_write_gating_threshold": [-0.1, 1.1, "0.5", float("nan"), True],
    "rejection_sample_method": ["strict", "typical", 1],
    "synthetic_acceptance_rates": [[], 0.5, [1.5], [0.5, "0.2"], [0.5, -0.1], [float("nan")]],
    "synthetic_acceptance_length": [0.5, "2", float("inf"), True],
    "speculative_token_tree": [[], "[]", "(0,", "[0, 1]", 3, [0], [[0], []], [[0], [-1]], [[16]], [["0"]], [[True]]],
    "tree_width": [0, 17, 2.0, "2", True],
    "tree_nodes": [0, 64, 2.0, "2", True],
}


class TestValues:
    @pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in WRONG_VALUES.items() for v in values])
    def test_a_wrong_value_is_named_with_what_is_expected(self, key: str, value: Any) -> None:
        method = {"prompt": "ngram", "suffix": "suffix"}.get(key.partition("_")[0])
        method = "early_exit" if key == "assistant_early_exit" else method
        base = {"model": "drafter"} if method is None else {"method": method}
        if key.endswith("lookbehind"):
            base["use_heterogeneous_vocab"] = "slem"
        if key in ("draft_confidence_scope", "signal"):
            base["policy"] = "confidence"
        if key == "tree_nodes":
            base["tree_width"] = 2  # type: ignore[assignment]
        if key.startswith("synthetic"):
            base["rejection_sample_method"] = "synthetic"
        with pytest.raises(ConfigError) as caught:
            SpeculativeConfig(**base | {key: value})
        message = str(caught.value)
        assert message.startswith(f"{key} is {value!r}; expected ")
        assert "\n" not in message

    def test_every_field_says_what_it_expects(self) -> None:
        assert set(WRONG_VALUES) == set(SpeculativeConfig.model_fields)
        for name, info in SpeculativeConfig.model_fields.items():
            assert any(isinstance(entry, Expected) for entry in info.metadata), name

    @pytest.mark.parametrize("k", [1, 64])
    def test_the_bounds_of_the_length(self, k: int) -> None:
        assert draft(num_speculative_tokens=k).num_speculative_tokens == k

    def test_an_integer_is_a_threshold(self) -> None:
        assert draft(draft_confidence_threshold=1).draft_confidence_threshold == 1.0


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "neither a method nor a model"),
    ({"method": "draft_model"}, "model is None"),
    ({"method": "draft_model", "model": "[ngram]"}, "'\\[ngram\\]'"),
    ({"method": "ngram", "model": "drafter"}, "model is 'drafter' but method is 'ngram'"),
    ({"method": "ngram", "revision": "main"}, "revision is 'main' but method is 'ngram'"),
    ({"method": "ngram", "dtype": "float32"}, "dtype is 'float32' but method is 'ngram'"),
    ({"method": "ngram", "quantization": "int8"}, "quantization is 'int8' but method is 'ngram'"),
    ({"method": "ngram", "draft_sample_method": "probabilistic"}, "a looked-up draft is certain"),
    ({"method": "ngram", "draft_confidence_threshold": 0.5}, "'ngram', which has no confidence"),
    ({"method": "ngram", "policy": "confidence"}, "'ngram', which has no confidence"),
    (
        {"method": "ngram", "suffix_decoding_max_tree_depth": 9},
        "9 but method is 'ngram'; expected no suffix_decoding_m",
    ),
    (
        {"method": "suffix", "prompt_lookup_max": 3},
        "3 but method is 'suffix'; expected no prompt_lookup_max, or method",
    ),
    ({"method": "suffix", "model": "drafter"}, "model is 'drafter' but method is 'suffix'"),
    ({"method": "suffix", "speculative_token_tree": [(0,), (1,)]}, "expected tree_width and tree_nodes instead"),
    ({"method": "suffix", "tree_width": 2, "policy": "auto"}, "policy is 'auto'; expected no tree_width, or policy"),
    (
        {"model": "m", "suffix_decoding_min_token_prob": 0.2, "policy": "constant"},
        "suffix_decoding_min_token_prob is 0.2 but method is 'draft_model' and policy is 'constant'; expected no "
        "suffix_decoding_min_token_prob, method 'suffix', or policy 'auto'",
    ),
    ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min is 5 but"),
    (
        {"model": "m", "prompt_lookup_max": 3, "policy": "constant"},
        "prompt_lookup_max is 3 but method is 'draft_model' and policy is 'constant'",
    ),
    ({"method": "ngram", "kv_write_gating_threshold": 0.5}, "kv_write_gating_threshold is 0.5 but method is 'ngram'"),
    (
        {"method": "ngram", "draft_length_options": [2, 4], "draft_confidence_threshold": 0.5},
        "draft_confidence_threshold is 0.5 but method is 'ngram', which has no confidence",
    ),
    (
        {"model": "m", "policy": "auto", "draft_confidence_threshold": 0.5},
        "0.5 but policy is 'auto', which decides by itself when to stop; expected no threshold, or policy 'confidence'",
    ),
    (
        {"model": "m", "policy": "constant", "dynamic_config_path": "f"},
        "dynamic_config_path is 'f' but policy is 'constant'; expected no dynamic_config_path, or policy 'goodput' or",
    ),
    (
        {"model": "m", "policy": "auto", "draft_length_options": [2, 4]},
        r"draft_length_options is \[2, 4\] but policy is 'auto'; expected no draft_length_options, or policy 'elastic'",
    ),
    (
        {"model": "m", "draft_length_options": [2], "num_speculative_tokens_per_batch_size": [[1, 8, 4]]},
        r"num_speculative_tokens_per_batch_size is \[\[1, 8, 4\]\] but policy is 'elastic'",
    ),
    ({"model": "m", "policy": "goodput"}, "policy is 'goodput' but there is no dynamic_config_path; expected one"),
    ({"model": "m", "policy": "schedule"}, "'schedule' but there is no num_speculative_tokens_per_batch_size"),
    (
        {"model": "m", "draft_length_options": [5, 10], "num_speculative_tokens": 8},
        r"draft_length_options is \[5, 10\] but num_speculative_tokens is 8",
    ),
    (
        {"model": "m", "num_assistant_tokens_schedule": "constant", "dynamic_config_path": "f"},
        "'constant' but policy is 'goodput'",
    ),
    ({"model": "m", "dynamic_config_path": "/no/such"}, "the profile '/no/such' cannot be read"),
    ({"model": "m", "rejection_sample_method": "synthetic"}, "'synthetic' with neither of synthetic_acceptance_rates"),
    (
        {"model": "m", "synthetic_acceptance_length": 2.0},
        "synthetic_acceptance_length is 2.0 but rejection_sample_method is 'standard'",
    ),
    (
        {"model": "m", "rejection_sample_method": "block", "synthetic_acceptance_rates": [0.5]},
        r"synthetic_acceptance_rates is \(0.5,\) but rejection_sample_method is 'block'",
    ),
    (
        {"model": "m", "policy": "heuristic", "draft_confidence_threshold": 0.5},
        "0.5 but policy is 'heuristic'",
    ),
    (
        {"model": "m", "policy": "constant", "draft_confidence_threshold": "auto"},
        "'auto' but policy is 'constant'",
    ),
    (
        {"model": "m", "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.4},
        "'heuristic' but policy is 'confidence'",
    ),
    (
        {"model": "m", "num_assistant_tokens_schedule": "heuristic", "policy": "constant"},
        "'heuristic' but policy is 'constant'",
    ),
    ({"model": "m", "num_assistant_tokens_schedule": "linear"}, "'linear'; expected 'constant'"),
    ({"model": "m", "draft_confidence_scope": "request"}, "draft_confidence_scope is 'request' but policy"),
    ({"model": "m", "policy": "heuristic", "signal": "token_prob"}, "signal is 'token_prob' but policy"),
]


@pytest.mark.parametrize(("given", "said"), CONTRADICTIONS, ids=lambda value: str(value)[:60])
def test_contradictions_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SpeculativeConfig(**given)
