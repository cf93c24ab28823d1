"""A trained head as a checkpoint: config.json, weights, facts and card."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dynaspec.contract.errors import ConfigError
from dynaspec.train.files import write_text_atomically
from dynaspec.train.heads.head import TrainedHead
from dynaspec.train.heads.shape import HeadShape


def decoder_config(shape: HeadShape) -> dict[str, Any]:
    """A head's decoder layer as Transformers' configuration of a Llama has it."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.positions,
        "vocab_size": shape.vocab,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def export_head(out: Path, head: TrainedHead, config: dict[str, Any], facts: dict[str, Any], card: str) -> None:
    """Write the folder ``out``: config.json, model.safetensors, training.json, README.md.

    Each file is replaced whole; the weights last but one, so that a reader never sees a config without them.
    """
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(head.checkpoint(), partial / "model.safetensors", {"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        (partial / "training.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        (partial / "README.md").write_text(card, "utf-8")
        out.mkdir(parents=True, exist_ok=True)
        for name in ("model.safetensors", "config.json", "training.json", "README.md"):
            (partial / name).chmod(0o644)  # safetensors lets nobody else read its files
            os.replace(partial / name, out / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """``model.safetensors`` of an exported head.

    Raises:
        ConfigError: there is none.
    """
    try:
        weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
        return weights
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"head: got {str(folder)!r}, expected one with model.safetensors ({error})") from error


def read_facts(folder: Path) -> dict[str, Any]:
    """``training.json`` of an exported head.

    Raises:
        ConfigError: there is none.
    """
    path = folder / "training.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return facts
    except (OSError, ValueError) as error:
        raise ConfigError(f"head: got {str(folder)!r}, expected one with training.json ({error})") from error


def write_facts(folder: Path, facts: dict[str, Any], card: str) -> None:
    """Replace what is said of an exported head."""
    write_text_atomically(folder / "training.json", json.dumps(facts, indent=1) + "\n")
    write_text_atomically(folder / "README.md", card)
