"""Phi-3 and Phi-4-mini: Llama with matrices that the checkpoint has fused already."""

from __future__ import annotations

from typing import Any

from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Layer, Weights
from dynaspec.model.reader import Reader

from .common import windows_everywhere
from .llama import assemble, shape


def config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    return DecoderConfig(**shape(hf, max_model_len), windows=windows_everywhere(hf))


def weights(reader: Reader, config: DecoderConfig) -> Weights:
    layers = (_layer(reader, config, index) for index in range(config.num_layers))
    return assemble(reader, config, tuple(layers))


def _layer(reader: Reader, config: DecoderConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    return Layer(
        attention_norm=reader.norm(f"{prefix}.input_layernorm"),
        qkv=reader.linear([f"{prefix}.self_attn.qkv_proj"], [sum(config.qkv_sizes)], hidden),
        out=reader.linear([f"{prefix}.self_attn.o_proj"], [hidden], config.qkv_sizes[0]),
        mlp_norm=reader.norm(f"{prefix}.post_attention_layernorm"),
        up=reader.linear([f"{prefix}.mlp.gate_up_proj"], [2 * inner], hidden),
        down=reader.linear([f"{prefix}.mlp.down_proj"], [hidden], inner),
        window=config.window(index),
    )
