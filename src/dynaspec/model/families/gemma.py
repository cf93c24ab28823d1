"""Gemma 2 and 3, text only: norms before and after each part, some layers with a sliding window.

Gemma 2 has soft caps. Gemma 3 has norms on query and key heads instead, and another rotation in the layers that have a
sliding window.
"""

from __future__ import annotations

from typing import Any

from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Layer, Weights
from dynaspec.model.reader import Reader

from .common import require, rope, windows_by_type
from .llama import assemble, projections, shape


def gemma2_config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    return DecoderConfig(**_fields(hf, max_model_len), attention_softcap=hf.attn_logit_softcapping)


def gemma3_config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    require(not hf.use_bidirectional_attention, "attention to what follows (use_bidirectional_attention)")
    require(hf.attn_logit_softcapping is None, "soft caps of attention scores")
    fields = _fields(hf, max_model_len, "full_attention")
    local = rope(hf, fields["head_dim"], fields["max_position"], layer_type="sliding_attention")
    return DecoderConfig(**fields, local_rope=local, qk_norm=True)


def _fields(hf: Any, max_model_len: int | None, layer_type: str | None = None) -> dict[str, Any]:
    """The fields that mean the same in both; ``layer_type``: see ``shape``."""
    return {
        **shape(hf, max_model_len, layer_type),
        "norm": "rms_plus_one",
        "qkv_bias": bool(hf.attention_bias),
        "out_bias": bool(hf.attention_bias),
        "windows": windows_by_type(hf),
        "attention_scale": hf.query_pre_attn_scalar**-0.5,
        "logits_softcap": hf.final_logit_softcapping,
        "embedding_scale": hf.hidden_size**0.5,
    }


def weights(reader: Reader, config: DecoderConfig) -> Weights:
    layers = (_layer(reader, config, index) for index in range(config.num_layers))
    return assemble(reader, config, tuple(layers))


def _layer(reader: Reader, config: DecoderConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}"
    return Layer(
        attention_norm=reader.norm(f"{prefix}.input_layernorm"),
        post_attention_norm=reader.norm(f"{prefix}.post_attention_layernorm"),
        mlp_norm=reader.norm(f"{prefix}.pre_feedforward_layernorm"),
        post_mlp_norm=reader.norm(f"{prefix}.post_feedforward_layernorm"),
        window=config.window(index),
        **projections(reader, config, prefix),
    )
