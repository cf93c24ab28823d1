"""GPT-2, whose matrices are stored [in, out]."""

from __future__ import annotations

from typing import Any

from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Layer, Weights
from dynaspec.model.linear import Linear
from dynaspec.model.reader import Reader

from .common import activation, end_tokens, length, require


def config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    require(not hf.scale_attn_by_inverse_layer_idx, "attention scaled by layer (scale_attn_by_inverse_layer_idx)")
    require(not hf.add_cross_attention, "cross attention")
    return DecoderConfig(
        num_layers=hf.n_layer,
        hidden_size=hf.n_embd,
        vocab_size=hf.vocab_size,
        num_heads=hf.n_head,
        num_kv_heads=hf.n_head,
        head_dim=hf.n_embd // hf.n_head,
        intermediate_size=hf.n_inner or 4 * hf.n_embd,
        max_position=length(hf.n_positions, max_model_len),
        norm="layer",
        norm_eps=hf.layer_norm_epsilon,
        mlp=activation(hf.activation_function, gated=False),
        learned_positions=hf.n_positions,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        attention_scale=None if hf.scale_attn_weights else 1.0,
        tied_embeddings=bool(hf.tie_word_embeddings),
        eos_token_ids=end_tokens(hf),
    )


def weights(reader: Reader, config: DecoderConfig) -> Weights:
    prefix = reader.prefix(("transformer.", ""), "wte.weight")
    embedding = reader.tensor(f"{prefix}wte.weight", config.vocab_size, config.hidden_size)
    return Weights(
        embedding=embedding,
        position_embedding=reader.positions(f"{prefix}wpe.weight"),
        layers=tuple(_layer(reader, config, f"{prefix}h.{index}") for index in range(config.num_layers)),
        final_norm=reader.norm(f"{prefix}ln_f"),
        head=reader.head("lm_head", embedding),
    )


def _layer(reader: Reader, config: DecoderConfig, prefix: str) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    return Layer(
        attention_norm=reader.norm(f"{prefix}.ln_1"),
        qkv=_transposed(reader, f"{prefix}.attn.c_attn", 3 * hidden, hidden),
        out=_transposed(reader, f"{prefix}.attn.c_proj", hidden, hidden),
        mlp_norm=reader.norm(f"{prefix}.ln_2"),
        up=_transposed(reader, f"{prefix}.mlp.c_fc", inner, hidden),
        down=_transposed(reader, f"{prefix}.mlp.c_proj", hidden, inner),
        window=None,
    )


def _transposed(reader: Reader, name: str, out: int, width: int) -> Linear:
    weight = reader.tensor(f"{name}.weight", width, out).T
    return reader.build(weight.contiguous(), reader.tensor(f"{name}.bias", out))
