"""Qwen2, Qwen2.5 and MiMo-7B: Llama with biases on queries, keys and values.

MiMo's checkpoint also has a prediction layer, see ``decoder_heads.mtp``.
"""

from __future__ import annotations

from typing import Any

from dynaspec.model.config import DecoderConfig

from .common import windows_by_type
from .llama import shape, weights

__all__ = ["ARCHITECTURES", "config", "weights"]

ARCHITECTURES = ("Qwen2ForCausalLM", "MiMoForCausalLM")


def config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    return DecoderConfig(**shape(hf, max_model_len), qkv_bias=True, windows=windows_by_type(hf))
