"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from dynaspec.model.config import DecoderConfig

from .common import windows_by_type
from .llama import shape, weights

__all__ = ["ARCHITECTURES", "config", "weights"]

ARCHITECTURES = ("Qwen2ForCausalLM",)


def config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    return DecoderConfig(**shape(hf, max_model_len), qkv_bias=True, windows=windows_by_type(hf))
