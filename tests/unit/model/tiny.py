"""A tiny Llama checkpoint, written without Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tensors() -> dict[str, torch.Tensor]:
    """The weights of ``CONFIG``, float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (50, 32), "model.norm.weight": (32,), "lm_head.weight": (50, 32)}
    for i in range(2):
        shapes |= {
            f"model.layers.{i}.input_layernorm.weight": (32,),
            f"model.layers.{i}.post_attention_layernorm.weight": (32,),
            f"model.layers.{i}.self_attn.q_proj.weight": (32, 32),
            f"model.layers.{i}.self_attn.k_proj.weight": (16, 32),
            f"model.layers.{i}.self_attn.v_proj.weight": (16, 32),
            f"model.layers.{i}.self_attn.o_proj.weight": (32, 32),
            f"model.layers.{i}.mlp.gate_proj.weight": (40, 32),
            f"model.layers.{i}.mlp.up_proj.weight": (40, 32),
            f"model.layers.{i}.mlp.down_proj.weight": (32, 40),
        }
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def write(
    directory: Path, config: dict[str, Any] | None = None, weights: dict[str, torch.Tensor] | None = None
) -> Path:
    """Writes config.json and model.safetensors; ``config`` is merged into ``CONFIG``."""
    (directory / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    save_file(tensors() if weights is None else weights, directory / "model.safetensors")
    return directory
