"""GPT-NeoX and Pythia: partial rotary embedding, attention and MLP side by side."""

from __future__ import annotations

from typing import Any

import torch

from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Layer, Weights
from dynaspec.model.linear import Linear
from dynaspec.model.reader import Reader

from .common import activation, end_tokens, length, rope


def config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    head_dim = hf.hidden_size // hf.num_attention_heads
    max_position = length(hf.max_position_embeddings, max_model_len)
    return DecoderConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        vocab_size=hf.vocab_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=hf.intermediate_size,
        max_position=max_position,
        norm="layer",
        norm_eps=hf.layer_norm_eps,
        mlp=activation(hf.hidden_act, gated=False),
        rope=rope(hf, head_dim, max_position, partial=getattr(hf, "rotary_pct", None)),
        parallel_residual=bool(hf.use_parallel_residual),
        qkv_bias=bool(hf.attention_bias),
        out_bias=bool(hf.attention_bias),
        mlp_bias=True,
        tied_embeddings=bool(hf.tie_word_embeddings),
        eos_token_ids=end_tokens(hf),
    )


def weights(reader: Reader, config: DecoderConfig) -> Weights:
    embedding = reader.tensor("gpt_neox.embed_in.weight", config.vocab_size, config.hidden_size)
    return Weights(
        embedding=embedding,
        position_embedding=None,
        layers=tuple(_layer(reader, config, f"gpt_neox.layers.{index}") for index in range(config.num_layers)),
        final_norm=reader.norm("gpt_neox.final_layer_norm"),
        head=reader.head("embed_out", embedding),
    )


def _layer(reader: Reader, config: DecoderConfig, prefix: str) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    return Layer(
        attention_norm=reader.norm(f"{prefix}.input_layernorm"),
        qkv=_qkv(reader, config, f"{prefix}.attention.query_key_value"),
        out=reader.linear([f"{prefix}.attention.dense"], [hidden], hidden, config.out_bias),
        mlp_norm=reader.norm(f"{prefix}.post_attention_layernorm"),
        up=reader.linear([f"{prefix}.mlp.dense_h_to_4h"], [inner], hidden, config.mlp_bias),
        down=reader.linear([f"{prefix}.mlp.dense_4h_to_h"], [hidden], inner, config.mlp_bias),
        window=None,
    )


def _qkv(reader: Reader, config: DecoderConfig, name: str) -> Linear:
    """The checkpoint has query, key and value of each head together; we want all queries first."""

    def reorder(stored: torch.Tensor) -> torch.Tensor:
        by_head = stored.view(config.num_heads, 3, config.head_dim, *stored.shape[1:])
        return by_head.transpose(0, 1).reshape(stored.shape)

    rows = sum(config.qkv_sizes)
    bias = reorder(reader.tensor(f"{name}.bias", rows)) if config.qkv_bias else None
    return reader.build(reorder(reader.tensor(f"{name}.weight", rows, config.hidden_size)), bias)
