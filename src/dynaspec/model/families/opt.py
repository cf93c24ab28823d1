"""OPT with the norm before each part, which is all sizes but 350M."""

from __future__ import annotations

from typing import Any

from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Layer, Weights
from dynaspec.model.reader import Reader

from .common import activation, end_tokens, length, require

_OFFSET = 2
"""The first rows of the position embedding belong to padding."""


def config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    require(hf.do_layer_norm_before, "norms behind each part (do_layer_norm_before=false)")
    require(hf.word_embed_proj_dim == hf.hidden_size, "projections around the embeddings (word_embed_proj_dim)")
    require(hf.layer_norm_elementwise_affine, "norms without weights (layer_norm_elementwise_affine=false)")
    require(not hf._remove_final_layer_norm, "no final norm (_remove_final_layer_norm=true)")
    return DecoderConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        vocab_size=hf.vocab_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_attention_heads,
        head_dim=hf.hidden_size // hf.num_attention_heads,
        intermediate_size=hf.ffn_dim,
        max_position=length(hf.max_position_embeddings, max_model_len),
        norm="layer",
        norm_eps=1e-5,
        mlp=activation(hf.activation_function, gated=False),
        learned_positions=hf.max_position_embeddings,
        qkv_bias=bool(hf.enable_bias),
        out_bias=bool(hf.enable_bias),
        mlp_bias=bool(hf.enable_bias),
        tied_embeddings=bool(hf.tie_word_embeddings),
        eos_token_ids=end_tokens(hf),
    )


def weights(reader: Reader, config: DecoderConfig) -> Weights:
    prefix = reader.prefix(("model.decoder.", "decoder."), "embed_tokens.weight")
    embedding = reader.tensor(f"{prefix}embed_tokens.weight", config.vocab_size, config.hidden_size)
    return Weights(
        embedding=embedding,
        position_embedding=reader.positions(f"{prefix}embed_positions.weight", _OFFSET),
        layers=tuple(_layer(reader, config, f"{prefix}layers.{index}") for index in range(config.num_layers)),
        final_norm=reader.norm(f"{prefix}final_layer_norm"),
        head=reader.head("lm_head", embedding),
    )


def _layer(reader: Reader, config: DecoderConfig, prefix: str) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
    return Layer(
        attention_norm=reader.norm(f"{prefix}.self_attn_layer_norm"),
        qkv=reader.linear(qkv, config.qkv_sizes, hidden, config.qkv_bias),
        out=reader.linear([f"{prefix}.self_attn.out_proj"], [hidden], hidden, config.out_bias),
        mlp_norm=reader.norm(f"{prefix}.final_layer_norm"),
        up=reader.linear([f"{prefix}.fc1"], [inner], hidden, config.mlp_bias),
        down=reader.linear([f"{prefix}.fc2"], [hidden], inner, config.mlp_bias),
        window=None,
    )
