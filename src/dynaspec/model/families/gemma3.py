"""Gemma 3, text only: Gemma 2 with norms on query and key heads, without soft caps, and with a rotation of their own in
the layers that have a sliding window."""

from __future__ import annotations

from typing import Any

from dynaspec.model.config import DecoderConfig

from .common import require, rope, windows_by_type
from .gemma2 import weights
from .llama import shape

__all__ = ["ARCHITECTURES", "config", "weights"]

ARCHITECTURES = ("Gemma3ForCausalLM",)


def config(hf: Any, max_model_len: int | None) -> DecoderConfig:
    require(not hf.use_bidirectional_attention, "attention to what follows (use_bidirectional_attention)")
    require(hf.attn_logit_softcapping is None, "soft caps of attention scores")
    fields = shape(hf, max_model_len, "full_attention")
    return DecoderConfig(
        **fields,
        local_rope=rope(hf, fields["head_dim"], fields["max_position"], layer_type="sliding_attention"),
        norm="rms_plus_one",
        qk_norm=True,
        qkv_bias=bool(hf.attention_bias),
        out_bias=bool(hf.attention_bias),
        windows=windows_by_type(hf),
        attention_scale=hf.query_pre_attn_scalar**-0.5,
        logits_softcap=hf.final_logit_softcapping,
        embedding_scale=hf.hidden_size**0.5,
    )
