"""GPT-J and CodeGen: interleaved partial rotary embedding; attention and MLP side by side behind one norm.

CodeGen stores queries, values and keys in four shards, as its training wanted them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynaspec.model.config import DecoderConfig, RopeConfig
from dynaspec.model.decoder import Layer, Weights
from dynaspec.model.linear import Linear
from dynaspec.model.reader import Reader

from .common import activation, end_tokens, length

_SHARDS = 4


def config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    head_dim = hf.n_embd // hf.n_head
    rotated = hf.rotary_dim or head_dim
    return DecoderConfig(
        num_layers=hf.n_layer,
        hidden_size=hf.n_embd,
        vocab_size=hf.vocab_size,
        num_heads=hf.n_head,
        num_kv_heads=hf.n_head,
        head_dim=head_dim,
        intermediate_size=hf.n_inner or 4 * hf.n_embd,
        max_position=length(hf.n_positions, max_model_len),
        norm="layer",
        norm_eps=hf.layer_norm_epsilon,
        mlp=activation(hf.activation_function, gated=False),
        rope=RopeConfig(rotated, tuple(10000.0 ** (-2 * i / rotated) for i in range(rotated // 2)), interleaved=True),
        parallel_residual=True,
        mlp_bias=True,
        head_bias=True,
        tied_embeddings=bool(hf.tie_word_embeddings),
        eos_token_ids=end_tokens(hf),
    )


def gptj_weights(reader: Reader, config: DecoderConfig) -> Weights:
    return _weights(reader, config, _gptj_qkv)


def codegen_weights(reader: Reader, config: DecoderConfig) -> Weights:
    return _weights(reader, config, _codegen_qkv)


def _weights(reader: Reader, config: DecoderConfig, qkv: Callable[[Reader, DecoderConfig, str], Linear]) -> Weights:
    embedding = reader.tensor("transformer.wte.weight", config.vocab_size, config.hidden_size)
    prefixes = (f"transformer.h.{index}" for index in range(config.num_layers))
    layers = tuple(_layer(reader, config, prefix, qkv(reader, config, f"{prefix}.attn")) for prefix in prefixes)
    head = reader.head("lm_head", embedding, config.head_bias)
    return Weights(embedding, None, layers, reader.norm("transformer.ln_f"), head)


def _layer(reader: Reader, config: DecoderConfig, prefix: str, qkv: Linear) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    return Layer(
        attention_norm=reader.norm(f"{prefix}.ln_1"),
        qkv=qkv,
        out=reader.linear([f"{prefix}.attn.out_proj"], [hidden], hidden),
        up=reader.linear([f"{prefix}.mlp.fc_in"], [inner], hidden, config.mlp_bias),
        down=reader.linear([f"{prefix}.mlp.fc_out"], [hidden], inner, config.mlp_bias),
        window=None,
    )


def _gptj_qkv(reader: Reader, config: DecoderConfig, prefix: str) -> Linear:
    names = [f"{prefix}.{name}_proj" for name in "qkv"]
    return reader.linear(names, config.qkv_sizes, config.hidden_size)


def _codegen_qkv(reader: Reader, config: DecoderConfig, prefix: str) -> Linear:
    hidden = config.hidden_size
    stored = reader.tensor(f"{prefix}.qkv_proj.weight", 3 * hidden, hidden)
    query, value, key = stored.view(_SHARDS, 3, hidden // _SHARDS, hidden).unbind(1)
    return reader.build(torch.cat([part.reshape(hidden, hidden) for part in (query, key, value)]))
