"""Qwen2, Qwen2.5, Qwen3 and MiMo-7B: Llama with biases on queries, keys and values, or (Qwen3) norms on query and key
heads.

MiMo is a Qwen2 whose checkpoint also has a prediction layer, see ``decoder_heads.mtp``.
"""

from __future__ import annotations

from typing import Any

from dynaspec.model.config import DecoderConfig

from .common import windows_by_type
from .llama import shape


def qwen2_config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    return DecoderConfig(**shape(hf, max_model_len), qkv_bias=True, windows=windows_by_type(hf))


def qwen3_config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    return DecoderConfig(
        **shape(hf, max_model_len),
        qk_norm=True,
        qkv_bias=bool(hf.attention_bias),
        out_bias=bool(hf.attention_bias),
        windows=windows_by_type(hf),
    )
