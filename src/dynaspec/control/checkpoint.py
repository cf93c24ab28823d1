"""What a drafter's checkpoint says of itself, where a configuration leaves it open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS

EAGLE3_ARCHITECTURES = frozenset(
    {
        *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Qwen3Eagle3Model"),
        *("Eagle3DraftModel", "Eagle3Model"),
    }
)
"""Names that mean EAGLE-3. Originals say ``LlamaForCausalLM`` and are known by their draft vocabulary."""
_STATE_HEADS = ("medusa", "mlp_speculator")
"""Methods that are a ``model_type`` too."""
_MLP_ARCHITECTURES = frozenset({"MLPSpeculatorPreTrainedModel", "ArcticLSTMSpeculatorPreTrainedModel"})
_MEDUSA_KEY = "medusa_num_heads"
"""In the config of a model with Medusa heads of its own, and of heads alone."""
EAGLE_ARCHITECTURES = frozenset({"EagleLlamaForCausalLM"})
"""Those of vLLM's format. Originals say ``LlamaForCausalLM``; many are known by ``bias``, which no Llama has."""


def read_checkpoint_config(model: object) -> dict[str, Any]:
    """The config.json of a local checkpoint; empty if there is none that can be read."""
    try:
        config = json.loads((Path(str(model)).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def checkpoint_method(model: object) -> str:
    """The method that a checkpoint is for; ``draft_model`` if it does not say."""
    config = read_checkpoint_config(model)
    found, kind = config.get("architectures"), config.get("speculators_model_type")
    names = found if isinstance(found, list) else []
    if config.get("model_type") in _STATE_HEADS:
        return str(config["model_type"])
    if _MEDUSA_KEY in config:
        return "medusa"
    if _MLP_ARCHITECTURES.intersection(names):
        return "mlp_speculator"
    if EAGLE3_ARCHITECTURES.intersection(names) or kind == "eagle3" or config.get("draft_vocab_size"):
        return "eagle3"
    if kind == "mtp":
        return "mtp"
    original = names == ["LlamaForCausalLM"] and config.get("num_hidden_layers") == 1 and "bias" in config
    if EAGLE_ARCHITECTURES.intersection(names) or original:
        return "eagle"
    return "draft_model"


def checkpoint_length(model: object) -> int | None:
    """The tokens that a checkpoint of heads says it drafts at most; None if it does not say."""
    config = read_checkpoint_config(model)
    key = {"mlp_speculator": "n_predict", "medusa": "num_heads"}.get(str(config.get("model_type")), _MEDUSA_KEY)
    told = config.get(key, config.get(_MEDUSA_KEY))
    return told if type(told) is int and told > 0 else None


class OwnTarget(NamedTuple):
    """What a drafter's checkpoint says of the model that it drafts for."""

    target: str
    speculation: dict[str, Any]
    """Keys of ``speculative_config``."""


def own_target(model: object) -> OwnTarget | None:
    """Of a checkpoint of ``speculators``, which may be given in the place of its target; None for any other.

    Raises:
        ConfigError: it names no target, a method that is not available here, or drafts that are not verified exactly.
    """
    own = read_checkpoint_config(model).get("speculators_config")
    if not isinstance(own, dict):
        return None
    target = (own.get("verifier") or {}).get("name_or_path")
    if not target:
        raise ConfigError(f"{model} is a drafter whose config.json names no verifier; expected the target as model")
    algorithm = own.get("algorithm")
    if algorithm not in METHODS:
        known = ", ".join(map(repr, METHODS))
        raise ConfigError(f"{model} is a drafter of method {algorithm!r}, which is not available; expected {known}")
    proposals = own.get("proposal_methods") or [{}]
    wanted = own.get("default_proposal_method")
    proposal = next((p for p in proposals if p.get("proposal_type") == wanted), proposals[0])
    accepts, tolerance = proposal.get("verifier_accept_k", 1), proposal.get("accept_tolerance", 0.0)
    if accepts != 1 or tolerance:
        raise ConfigError(
            f"{model} asks for verifier_accept_k {accepts} and accept_tolerance {tolerance}, which change the output; "
            "expected 1 and 0"
        )
    speculation = {"method": algorithm, "model": str(model)}
    if "speculative_tokens" in proposal:
        speculation["num_speculative_tokens"] = proposal["speculative_tokens"]
    return OwnTarget(str(target), speculation)
