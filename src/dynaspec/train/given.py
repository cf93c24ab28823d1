"""A target that exists already: what it must be, and what training a drafter for it must know."""

from __future__ import annotations

import hashlib
from pathlib import Path

from transformers import LlamaConfig

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.weights import read_json
from dynaspec.train.model import Shape
from dynaspec.train.tokenizer import END_OF_TEXT_ID

EXPECTED = "expected a folder with a Llama model in the Hugging Face layout"
FILES = ("config.json", "*.safetensors", "tokenizer.json")


def read_shape(folder: Path) -> Shape:
    """Sizes of the model in ``folder``.

    Raises:
        CheckpointError: there is none, or none that a drafter can be trained for.
        ConfigError: its sizes cannot be right, or are too large.
    """
    if not folder.is_dir():
        raise CheckpointError(f"target: got {str(folder)!r}, which is no folder, {EXPECTED}")
    for pattern in FILES:
        if not any(folder.glob(pattern)):
            raise CheckpointError(f"target: got {str(folder)!r}, which holds no {pattern}, {EXPECTED}")
    architectures = read_json(folder / "config.json").get("architectures")
    if architectures != ["LlamaForCausalLM"]:
        raise CheckpointError(f"target: got {str(folder)!r}, whose architectures are {architectures}, {EXPECTED}")
    config = LlamaConfig.from_pretrained(folder)
    if config.eos_token_id not in (END_OF_TEXT_ID, [END_OF_TEXT_ID]):
        raise CheckpointError(
            f"target: got {str(folder)!r}, which ends texts with token {config.eos_token_id}, "
            f"expected {END_OF_TEXT_ID}, as in targets that are trained here"
        )
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        intermediate=config.intermediate_size,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
        rope_theta=config.rope_parameters["rope_theta"],
        rms_eps=config.rms_norm_eps,
    )


def fingerprint(folder: Path) -> str:
    """Twelve hexadecimal digits that change with the model's weights, configuration or tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in FILES for path in folder.glob(pattern)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]
