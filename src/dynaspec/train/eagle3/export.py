"""A trained head as a checkpoint in the ``speculators`` format, which vLLM and dynaspec read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from dynaspec.contract.errors import ConfigError
from dynaspec.train.eagle3.head import Head
from dynaspec.train.eagle3.shape import HeadShape
from dynaspec.train.eagle3.vocabulary import DraftVocabulary
from dynaspec.train.files import write_text_atomically

FORMAT_VERSION = "0.9.0"


def head_config(shape: HeadShape, verifier: str, verifier_architectures: list[str], drafts: int) -> dict[str, Any]:
    """``config.json``; ``drafts`` is how many tokens the head was trained to draft in a row."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT_VERSION,
        "torch_dtype": "bfloat16",
        "draft_vocab_size": shape.draft_vocab,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        "embed_requires_grad": False,
        "transformer_layer_config": {
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
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": drafts,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
    }


def export_head(
    out: Path,
    head: Head,
    vocabulary: DraftVocabulary,
    config: dict[str, Any],
    facts: dict[str, Any],
    card: str,
) -> None:
    """Write the folder ``out``: config.json, model.safetensors, training.json, README.md.

    Each file is replaced whole; the weights last but one, so that a reader never sees a config without them.
    """
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tensors = head.checkpoint()
        if vocabulary.size != head.shape.draft_vocab:
            tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
        save_file(tensors, partial / "model.safetensors", {"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        (partial / "training.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        (partial / "README.md").write_text(card, "utf-8")
        out.mkdir(parents=True, exist_ok=True)
        for name in ("model.safetensors", "config.json", "training.json", "README.md"):
            (partial / name).chmod(0o644)  # safetensors lets nobody else read its files
            os.replace(partial / name, out / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
