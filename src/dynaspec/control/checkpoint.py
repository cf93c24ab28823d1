"""What a drafter's checkpoint says of itself, where a configuration leaves it open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EAGLE3_ARCHITECTURES = frozenset(
    {
        *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Qwen3Eagle3Model"),
        *("Eagle3DraftModel", "Eagle3Model"),
    }
)
"""Names that mean EAGLE-3. Originals say ``LlamaForCausalLM`` and are known by their draft vocabulary."""


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
    names = config.get("architectures")
    named = EAGLE3_ARCHITECTURES.intersection(names if isinstance(names, list) else ())
    if named or config.get("speculators_model_type") == "eagle3" or config.get("draft_vocab_size"):
        return "eagle3"
    return "draft_model"
