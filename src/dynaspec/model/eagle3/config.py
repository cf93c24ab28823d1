"""What an EAGLE-3 head's config.json says, in any of the layouts it is published in.

Originals (SafeAILab/EAGLE), SGLang, NVIDIA ModelOpt and AngelSlim write one flat config; ``speculators`` puts the
decoder's part into ``transformer_layer_config``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.config import DecoderConfig
from dynaspec.model.families.common import UnsupportedVariantError
from dynaspec.model.families.llama import shape

_FIXED = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Options of ModelOpt's ``eagle_config`` that have one value in every head seen; others are refused."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """A head: a decoder of one layer or a few, and what comes before it."""

    decoder: DecoderConfig
    """Its ``vocab_size`` is the target's."""
    draft_vocab: int
    """Tokens that it drafts."""
    target_hidden: int
    states: tuple[int, ...]
    """Hidden states of the target that it reads, see ``model.taps``."""
    fused: bool
    """They go through a linear layer; else it reads the state after the final norm as it is."""
    norm_before_residual: bool
    """The residual begins with the normed hidden state."""
    norm_output: bool
    """The state that the next step reads is the normed one (EAGLE-3.1)."""


def read_config(path: Path, raw: Mapping[str, Any], layers: int) -> Eagle3Config:
    """
    Args:
        path: of the file, for messages.
        raw: its JSON.
        layers: of the target.

    Raises:
        CheckpointError: something is missing, contradictory, or not supported.
    """
    from transformers import LlamaConfig

    inner = dict(raw.get("transformer_layer_config") or raw)
    inner.setdefault("head_dim", None)
    inner["tie_word_embeddings"] = False
    known = {key: value for key, value in inner.items() if key not in ("architectures", "model_type")}
    for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        if not isinstance(known.get(key), int):
            raise CheckpointError(f"{path}: {key} is {known.get(key)!r}; expected a number")
    known.setdefault("num_hidden_layers", 1)
    known.setdefault("max_position_embeddings", 2048)
    try:
        hf = LlamaConfig(**known)
        decoder = DecoderConfig(**shape(hf, None), qkv_bias=bool(inner.get("attention_bias", False)))
    except (UnsupportedVariantError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the head's decoder cannot be built: {error}") from error
    own = raw.get("eagle_config") or {}
    for key, only in _FIXED.items():
        if own.get(key, only) != only:
            raise CheckpointError(f"{path}: eagle_config.{key} is {own[key]!r}; expected {only!r}")
    fused = bool(own.get("use_aux_hidden_state", True))
    return Eagle3Config(
        decoder,
        draft_vocab=raw.get("draft_vocab_size") or decoder.vocab_size,
        target_hidden=raw.get("target_hidden_size") or decoder.hidden_size,
        states=_states(path, raw, own, layers) if fused else (layers + 1,),
        fused=fused,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_output=bool(raw.get("norm_output", False)),
    )


def _states(path: Path, raw: Mapping[str, Any], own: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Layer numbers mean a layer's input at the top level (vLLM, speculators), else its output (SGLang, ModelOpt)."""
    inputs: Sequence[int] | None = raw.get("eagle_aux_hidden_state_layer_ids")
    outputs: Sequence[int] | None = own.get("eagle_aux_hidden_state_layer_ids") or raw.get("target_layer_ids")
    if inputs is not None:
        states = tuple(int(layer) for layer in inputs)
    elif outputs is not None:
        states = tuple(int(layer) + 1 for layer in outputs)
    else:
        states = (2, layers // 2, layers - 3)
    if not states or min(states) < 0 or max(states) > layers or len(set(states)) < len(states):
        raise CheckpointError(
            f"{path}: the head reads the target's hidden states {list(states)}, but the target has {layers} layers; "
            f"expected different ones from 0 to {layers}"
        )
    return states
