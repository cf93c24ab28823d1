"""Llama 1 to 3 and Mistral; their names and shapes are what many later families build on."""

from __future__ import annotations

from typing import Any

from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Layer, Weights
from dynaspec.model.reader import Reader

from .common import activation, end_tokens, length, rope, windows_everywhere


def config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    bias = bool(getattr(hf, "attention_bias", False))
    return DecoderConfig(
        **shape(hf, max_model_len),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        windows=windows_everywhere(hf),
    )


def shape(hf: Any, max_model_len: int | None, layer_type: str | None = None) -> dict[str, Any]:
    """The fields that mean the same in all of Llama's descendants; ``layer_type``: whose rotation, see ``rope``."""
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    max_position = length(hf.max_position_embeddings, max_model_len)
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "vocab_size": hf.vocab_size,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": hf.intermediate_size,
        "max_position": max_position,
        "norm_eps": hf.rms_norm_eps,
        "mlp": activation(getattr(hf, "hidden_activation", None) or hf.hidden_act, gated=True),
        "rope": rope(hf, head_dim, max_position, layer_type=layer_type),
        "tied_embeddings": bool(hf.tie_word_embeddings),
        "eos_token_ids": end_tokens(hf),
    }


def weights(reader: Reader, config: DecoderConfig) -> Weights:
    layers = (layer(reader, config, f"model.layers.{index}", index) for index in range(config.num_layers))
    return assemble(reader, config, tuple(layers))


def assemble(reader: Reader, config: DecoderConfig, layers: tuple[Layer, ...]) -> Weights:
    """Layers with Llama's embedding, final norm and head."""
    embedding = reader.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = reader.head("lm_head", embedding, tied="model.embed_tokens")
    return Weights(embedding, None, layers, reader.norm("model.norm"), head)


def layer(reader: Reader, config: DecoderConfig, prefix: str, index: int) -> Layer:
    """One decoder layer, whose tensors' names begin with ``prefix``."""
    return Layer(
        attention_norm=reader.norm(f"{prefix}.input_layernorm"),
        mlp_norm=reader.norm(f"{prefix}.post_attention_layernorm"),
        window=config.window(index),
        **projections(reader, config, prefix),
    )


def projections(reader: Reader, config: DecoderConfig, prefix: str, width: int | None = None) -> dict[str, Any]:
    """The linear layers of one decoder layer, and the norms of query and key heads.

    Args:
        width: of what queries, keys and values are computed from; None = the model's.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = [f"{attention}.{name}_proj" for name in "qkv"]
    gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    return {
        "qkv": reader.linear(qkv, config.qkv_sizes, width or hidden, config.qkv_bias),
        "out": reader.linear([f"{attention}.o_proj"], [hidden], config.qkv_sizes[0], config.out_bias),
        "up": reader.linear(gate_up, [inner, inner], hidden, config.mlp_bias),
        "down": reader.linear([f"{mlp}.down_proj"], [hidden], inner, config.mlp_bias),
        "query_norm": reader.norm(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
        "key_norm": reader.norm(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
    }
