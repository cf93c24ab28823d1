"""Qwen3: Llama with norms on query and key heads."""

from __future__ import annotations

from typing import Any

from dynaspec.model.config import DecoderConfig

from .common import windows_by_type
from .llama import shape, weights

__all__ = ["ARCHITECTURES", "config", "weights"]

ARCHITECTURES = ("Qwen3ForCausalLM",)


def config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    return DecoderConfig(
        **shape(hf, max_model_len),
        qk_norm=True,
        qkv_bias=bool(hf.attention_bias),
        out_bias=bool(hf.attention_bias),
        windows=windows_by_type(hf),
    )
