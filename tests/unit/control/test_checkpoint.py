"""What a drafter's checkpoint says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import BY_PASSES
from dynaspec.control.checkpoint import checkpoint_method, own_target
from dynaspec.control.config import SpeculativeConfig
from dynaspec.engine.config import EngineConfig
from dynaspec.propose.registry import _LOADERS

SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": "the/target", "architectures": ["LlamaForCausalLM"]},
    },
}


def write(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def changed(**own: Any) -> dict[str, Any]:
    return SPECULATORS | {"speculators_config": SPECULATORS["speculators_config"] | own}


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "draft_model"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 9}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": None}, "draft_model"),
        ({"model_type": "medusa", "architectures": ["MedusaModel"]}, "medusa"),
        ({"medusa_num_heads": 2, "base_model_name_or_path": "x"}, "medusa"),
        ({"medusa_num_heads": 3, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp_speculator"),
        ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "mlp_speculator"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": False}, "eagle"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, "draft_model"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "bias": False}, "draft_model"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"]}, "mtp"),
        ({"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}, "draft_model"),
    ],
)
def test_a_model_given_without_a_method_says_which(config: dict[str, Any], method: str, tmp_path: Path) -> None:
    path = write(tmp_path, config)
    assert checkpoint_method(path) == method
    parsed = SpeculativeConfig.parse({"model": path})
    assert parsed is not None
    assert parsed.method == method


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"model_type": "mlp_speculator", "n_predict": 3}, 3),
        ({"model_type": "medusa", "num_heads": 4, "n_predict": 9}, 4),
        ({"medusa_num_heads": 7}, 7),
        ({"model_type": "medusa", "medusa_num_heads": 6}, 6),
        ({"model_type": "medusa", "num_heads": "4"}, None),
        ({"model_type": "medusa"}, None),
        ({"medusa_num_heads": 100}, 64),
    ],
)
def test_heads_say_how_long_drafts_are(config: dict[str, Any], length: int | None, tmp_path: Path) -> None:
    path = write(tmp_path, config)
    for policy, default in (("constant", 5), ("heuristic", 5), ("elastic", 15)):
        parsed = SpeculativeConfig(model=path, policy=policy)
        assert parsed.num_speculative_tokens == (length or default)
        if policy == "elastic":
            assert parsed.draft_length_options is not None
            assert parsed.draft_length_options[-1] == (length or default)
    assert SpeculativeConfig(model=path, policy="constant", num_speculative_tokens=2).num_speculative_tokens == 2
    assert SpeculativeConfig(model=path).num_speculative_tokens == 16  # an upper bound
    other = SpeculativeConfig(method="draft_model", model=path, policy="constant")
    assert other.num_speculative_tokens == 5


def test_what_cannot_be_read_is_a_draft_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("nonsense")
    assert checkpoint_method(tmp_path) == checkpoint_method("a/hub-id") == checkpoint_method(None) == "draft_model"


def test_a_drafter_that_names_its_target_stands_for_both(tmp_path: Path) -> None:
    path = write(tmp_path, SPECULATORS)
    config = EngineConfig.build(model=path)
    assert config.model == "the/target"
    assert config.speculative_config is not None
    assert (config.speculative_config.method, config.speculative_config.model) == ("eagle3", path)
    assert config.speculative_config.num_speculative_tokens == 3
    config = EngineConfig.build(model=path, speculative_config='{"policy": "constant", "num-speculative-tokens": 7}')
    assert config.speculative_config is not None
    assert (config.speculative_config.model, config.speculative_config.num_speculative_tokens) == (path, 7)


def test_a_prediction_layer_may_be_given_alone_too(tmp_path: Path) -> None:
    path = write(tmp_path, changed(algorithm="mtp") | {"architectures": ["MTPDraftModel"]})
    config = EngineConfig.build(model=path)
    assert config.model == "the/target"
    assert config.speculative_config is not None
    assert (config.speculative_config.method, config.speculative_config.model) == ("mtp", path)


def test_a_prediction_layer_needs_no_model() -> None:
    config = SpeculativeConfig.parse({"method": "mtp", "num_speculative_tokens": 3})
    assert config is not None
    assert (config.method, config.model, config.hybrid_lookup) == ("mtp", None, True)
    with pytest.raises(ConfigError, match="revision is 'main' but no model is given; expected both or neither"):
        SpeculativeConfig.parse({"method": "mtp", "revision": "main"})
    for method in ("eagle", "eagle3", "draft_model"):
        with pytest.raises(ConfigError, match=f"method is '{method}' but model is None; expected an? "):
            SpeculativeConfig.parse({"method": method})


def test_a_model_that_names_no_other_stands_for_itself(tmp_path: Path) -> None:
    assert own_target(write(tmp_path, {"architectures": ["LlamaForCausalLM"]})) is None
    assert EngineConfig.build(model=str(tmp_path)).model == str(tmp_path)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"verifier": {}}, "names no verifier"),
        ({"algorithm": "dspark"}, "method 'dspark', which is not available"),
        ({"proposal_methods": [{"proposal_type": "greedy", "verifier_accept_k": 2}]}, "verifier_accept_k 2"),
        ({"proposal_methods": [{"proposal_type": "greedy", "accept_tolerance": 0.1}]}, "accept_tolerance 0.1"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(own: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EngineConfig.build(model=write(tmp_path, changed(**own)))


def test_every_method_that_drafts_by_passes_has_a_loader() -> None:
    assert set(_LOADERS) == set(BY_PASSES)
