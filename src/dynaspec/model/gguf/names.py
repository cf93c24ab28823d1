"""What Hugging Face calls the tensors of a GGUF file, and what was done to them when the file was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Change = Literal["rows by pairs", "one added"]
"""``rows by pairs``: the rows of query and key heads are ordered for GPT-J's rotation, each pair side by side, where
Hugging Face has the firsts of all pairs before the seconds. ``one added``: norms multiply by what is stored."""

_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ATTENTION = {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"} | {"self_attn.o_proj": "attn_output"}
_HEAD_NORMS = {f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"}
_MLP = {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
_FUSED = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TWO_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_FOUR_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYERS: Mapping[str, Mapping[str, str]] = {
    "llama": _ATTENTION | _MLP | _TWO_NORMS,
    "qwen2": _ATTENTION | _MLP | _TWO_NORMS,
    "qwen3": _ATTENTION | _MLP | _TWO_NORMS | _HEAD_NORMS,
    "gemma2": _ATTENTION | _MLP | _FOUR_NORMS,
    "gemma3": _ATTENTION | _MLP | _FOUR_NORMS | _HEAD_NORMS,
    "phi3": _FUSED | _TWO_NORMS,
}

ARCHITECTURES = tuple(_LAYERS)
"""In the files' own words."""
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
"""Tensors that belong to the config: what the frequencies of the rotation are divided by."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor comes from."""

    name: str
    """In the file."""
    change: Change | None
    """To be undone."""


def sources(architecture: str, layers: int) -> dict[str, Source]:
    """By Hugging Face's names, all tensors that there may be.

    Args:
        architecture: one of ``ARCHITECTURES``.
    """
    names = dict(_ENDS)
    for index in range(layers):
        names |= {f"model.layers.{index}.{ours}": f"blk.{index}.{it}" for ours, it in _LAYERS[architecture].items()}
    return {
        f"{ours}.{part}": Source(f"{it}.{part}", _change(architecture, ours))
        for ours, it in names.items()
        for part in ("weight", "bias")
    }


def _change(architecture: str, name: str) -> Change | None:
    if architecture == "llama" and name.endswith(("q_proj", "k_proj")):
        return "rows by pairs"
    if architecture.startswith("gemma") and name.endswith("norm"):
        return "one added"
    return None


def undo(change: Change, tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A tensor as Hugging Face has it.

    Args:
        tensor: [heads · head_dim, …] for rows by pairs.
    """
    if change == "one added":
        return tensor.float() - 1
    pairs = tensor.view(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
