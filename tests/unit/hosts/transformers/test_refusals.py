"""What cannot be done is refused in a sentence; what Transformers refuses, it refuses here too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.contract.methods import WITH_MODEL
from dynaspec.control.config import SpeculativeConfig
from dynaspec.hosts.transformers import Session, generate
from dynaspec.hosts.transformers.setup import resolve_setup
from unit.hosts.transformers.driving import ours, plain
from unit.hosts.transformers.pairs import Models

CONFIGS: list[tuple[Any, str]] = [
    ({"polcy": "auto"}, "did you mean policy"),
    ("{", "not JSON"),
    (7, "expected a mapping"),
    ({"policy": "elastic", "kv_write_gating_threshold": 0.2}, "kv_write_gating_threshold is 0.2"),
    ({"dtype": "bfloat16"}, "the model given as assistant_model"),
    ({"max_model_len": 64}, "max_model_len is 64"),
    ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}, "Transformers verifies drafts"),
    ({"rejection_sample_method": "block"}, "rejection_sample_method is 'block'"),
    ({"method": "ngram"}, "method is 'ngram' but an assistant is given"),
    ({"model": "another"}, "model is 'another'"),
    ({"policy": "constant", "prompt_lookup_max": 3}, "policy 'auto', which looks up beside the model"),
    ({"draft_sample_method": "greedy"}, "draft_sample_method is 'greedy'"),
    ({"num_speculative_tokens": 100}, "an integer from 1 to 64"),
    ({"policy": "goodput"}, "there is no dynamic_config_path"),
    ({"policy": "heuristic", "draft_confidence_threshold": 0.4}, "draft_confidence_threshold is 0.4"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS)
def test_configurations_that_cannot_be(decoder: Models, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(decoder, config)


def test_nothing_that_drafts(decoder: Models) -> None:
    with pytest.raises(ConfigError, match="neither assistant_model nor prompt_lookup_num_tokens"):
        ours(decoder, assistant_model=None)
    with pytest.raises(ConfigError, match="expected the loaded model as assistant_model"):
        ours(decoder, {"model": "some/draft"}, assistant_model=None)
    with pytest.raises(ConfigError, match="assistant_early_exit is 1, but 2 in speculative_config"):
        ours(decoder, {"assistant_early_exit": 2}, assistant_model=None, assistant_early_exit=1)
    with pytest.raises(ConfigError, match="so that the model itself drafts, and method is None, model 'some/draft'"):
        ours(decoder, {"assistant_early_exit": 1, "model": "some/draft"}, assistant_model=None)
    for method in WITH_MODEL:
        with pytest.raises(ConfigError, match=f"has method {method!r} .*expected the loaded model as assistant_model"):
            ours(decoder, {"method": method}, assistant_model=None)
    with pytest.raises(ConfigError, match="prompt_lookup_max and prompt_lookup_num_tokens"):
        ours(decoder, {"method": "ngram", "prompt_lookup_max": 3}, assistant_model=None, prompt_lookup_num_tokens=3)
    with pytest.raises(ConfigError, match="use_mtp is True"):
        ours(decoder, use_mtp=True)


def test_looked_up_drafts_have_no_confidence(decoder: Models) -> None:
    with pytest.raises(ConfigError, match="has no confidence"):
        ours(decoder, {"draft_confidence_threshold": 0.5}, assistant_model=None, prompt_lookup_num_tokens=3)


def test_what_is_no_model(decoder: Models) -> None:
    with pytest.raises(ConfigError, match="model is a Linear"):
        generate(torch.nn.Linear(1, 1), decoder.inputs, assistant_model=decoder.assistant)
    with pytest.raises(ConfigError, match="assistant_model is a str"):
        ours(decoder, assistant_model="models/draft")


def test_several_sequences(decoder: Models) -> None:
    with pytest.raises(RequestError, match="the batch has 2 sequences"):
        generate(decoder.target, decoder.inputs.repeat(2, 1), assistant_model=decoder.assistant, max_new_tokens=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams is 2; expected 1"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences has to be 1"),
        ({"cache_implementation": "static"}, "not supported with Static cache"),
        ({"use_cache": False}, "use_cache=True"),
    ],
)
def test_what_transformers_refuses(decoder: Models, options: dict[str, Any], message: str) -> None:
    session = Session()
    with pytest.raises(ValueError, match=message):
        ours(decoder, session=session, **options)
    output, _ = ours(decoder, session=session)  # it is fit for the next call
    assert torch.equal(output, plain(decoder))


def test_models_whose_state_cannot_be_rolled_back(decoder: Models) -> None:
    config = MambaConfig(vocab_size=96, hidden_size=8, state_size=4, num_hidden_layers=1, pad_token_id=0)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        generate(MambaForCausalLM(config).eval(), decoder.inputs, assistant_model=decoder.assistant, max_new_tokens=3)


def test_a_session_is_for_one_pair_and_configuration(decoder: Models) -> None:
    session = Session()
    ours(decoder, session=session)
    with pytest.raises(ConfigError, match="models and configuration of the first call"):
        ours(decoder, {"policy": "constant"}, session=session)
    with pytest.raises(ConfigError, match="expected the log to be the session's"):
        ours(decoder, session=session, decision_log="log.jsonl")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"policy": "auto", "num_speculative_tokens": 20}),
        ({"policy": "constant"}, {"num_speculative_tokens": 20, "draft_confidence_threshold": None}),
        (
            {"policy": "confidence"},
            {"draft_confidence_threshold": 0.4, "signal": "token_prob", "draft_confidence_scope": "request"},
        ),
        ({"draft_confidence_threshold": 0.6}, {"policy": "confidence", "signal": "confidence"}),
        ({"num_assistant_tokens_schedule": "heuristic"}, {"policy": "heuristic", "num_speculative_tokens": 20}),
        ('{"policy": "elastic"}', {"policy": "elastic", "draft_length_options": (5, 10, 15)}),
    ],
)
def test_defaults_are_those_of_transformers(decoder: Models, given: Any, expected: dict[str, Any]) -> None:
    config = resolve_setup(given, decoder.target, decoder.assistant, {}).config
    assert {name: getattr(config, name) for name in expected} == expected


def test_settings_come_from_the_call_then_from_generation_configs(
    decoder: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder.assistant.generation_config, "num_assistant_tokens", 7)
    monkeypatch.setattr(decoder.assistant.generation_config, "assistant_confidence_threshold", 0.25)

    def resolved(given: Any = None, **options: Any) -> SpeculativeConfig:
        return resolve_setup(given, decoder.target, decoder.assistant, options).config

    assert resolved().num_speculative_tokens == 7
    assert resolved(num_assistant_tokens=9).num_speculative_tokens == 9
    assert resolved({"num_assistant_tokens": 3}, num_assistant_tokens=9).num_speculative_tokens == 3
    assert resolved({"policy": "confidence"}).draft_confidence_threshold == 0.25
    finished = SpeculativeConfig(method="draft_model", model=decoder.assistant.name_or_path or "LlamaForCausalLM")
    assert resolved(finished).policy == "auto"
