"""GPT-J: interleaved partial rotary embedding; attention and MLP side by side behind one norm."""

from __future__ import annotations

from typing import Any

from dynaspec.model.config import DecoderConfig, RopeConfig
from dynaspec.model.layer import Layer, Weights
from dynaspec.model.linear import Linear
from dynaspec.model.reader import Reader

from .common import activation, length, special_tokens

ARCHITECTURES = ("GPTJForCausalLM",)


def config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    head_dim = hf.n_embd // hf.n_head
    rotated = hf.rotary_dim or head_dim
    return DecoderConfig(
        family=hf.model_type,
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
        **special_tokens(hf),
    )


def weights(reader: Reader, config: DecoderConfig) -> Weights:
    layers = (
        layer(reader, config, f"transformer.h.{index}", _qkv(reader, config, f"transformer.h.{index}.attn"))
        for index in range(config.num_layers)
    )
    return assemble(reader, config, tuple(layers))


def assemble(reader: Reader, config: DecoderConfig, layers: tuple[Layer, ...]) -> Weights:
    """Layers with GPT-J's embedding, final norm and head."""
    embedding = reader.tensor("transformer.wte.weight", config.vocab_size, config.hidden_size)
    head = reader.head("lm_head", embedding, config.head_bias)
    return Weights(embedding, None, layers, reader.norm("transformer.ln_f"), head)


def layer(reader: Reader, config: DecoderConfig, prefix: str, qkv: Linear) -> Layer:
    """All of a layer but its queries, keys and values."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return Layer(
        attention_norm=reader.norm(f"{prefix}.ln_1"),
        qkv=qkv,
        out=reader.linear([f"{prefix}.attn.out_proj"], [hidden], hidden),
        up=reader.linear([f"{prefix}.mlp.fc_in"], [inner], hidden, config.mlp_bias),
        down=reader.linear([f"{prefix}.mlp.fc_out"], [hidden], inner, config.mlp_bias),
        window=None,
    )


def _qkv(reader: Reader, config: DecoderConfig, prefix: str) -> Linear:
    names = [f"{prefix}.{name}_proj" for name in "qkv"]
    return reader.linear(names, config.qkv_sizes, config.hidden_size)
