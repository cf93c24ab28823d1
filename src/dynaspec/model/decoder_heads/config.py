"""What a head is, whichever method it is for, and whether it was made for its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Model
from dynaspec.model.families.common import UnsupportedVariantError
from dynaspec.model.families.llama import shape

FIRST_POSITION = 1
"""Of a text's first row: its first token has none, see ``head``."""
_DEFAULTS = {"num_hidden_layers": 1, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
"""Values of keys that may be missing: all but the first as in Transformers' ``LlamaConfig``, whose import takes two
seconds."""
_COUNTS = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"),
    *("num_hidden_layers", "max_position_embeddings"),
)
"""Keys whose values are whole numbers above 0."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head: a decoder of one layer or a few, and what comes before it."""

    decoder: DecoderConfig
    """Its ``vocab_size`` is the target's."""
    draft_vocab: int
    """Tokens that it drafts."""
    target_hidden: int
    states: tuple[int, ...]
    """Hidden states of the target that it reads, see ``model.taps``."""
    fused: bool = False
    """They go through a linear layer of their own (EAGLE-3), which the head's own states do not."""
    hidden_first: bool = False
    """Where both are projected: the hidden state comes before the embedding."""
    zero_first: bool = False
    """In a text's first row the embedding is zero (MTP as DeepSeek and MiMo have it)."""
    norm_before_residual: bool = False
    """The residual begins with the normed hidden state."""
    norm_output: bool = False
    """The state that the next step reads is the normed one (EAGLE-3.1, MTP)."""


def llama_decoder(path: Path, keys: Mapping[str, Any], *, qkv_bias: bool) -> DecoderConfig:
    """The decoder of a head whose config.json has the keys of a Llama's.

    Args:
        path: of the file, for messages.

    Raises:
        CheckpointError: something is missing, contradictory, or not supported.
    """
    values: dict[str, Any] = _DEFAULTS | {key: value for key, value in keys.items() if value is not None}
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    for key in (*_COUNTS, *({"head_dim"} & values.keys())):
        if not isinstance(values.get(key), int) or values[key] < 1:
            raise CheckpointError(f"{path}: {key} is {values.get(key)!r}; expected a whole number above 0")
    if not isinstance(values["rms_norm_eps"], float | int):
        raise CheckpointError(f"{path}: rms_norm_eps is {values['rms_norm_eps']!r}; expected a number")
    llama = SimpleNamespace(**values | {"tie_word_embeddings": False})
    try:
        return DecoderConfig(**shape(llama, None), qkv_bias=qkv_bias)
    except (UnsupportedVariantError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the head's decoder cannot be built: {error}") from error


def check_target(path: Path, config: HeadConfig, target: Model) -> None:
    """
    Raises:
        CheckpointError: the head whose config.json is at ``path`` was made for another target.
    """
    given, wanted = target.config, config.decoder
    if config.target_hidden != given.hidden_size:
        raise CheckpointError(
            f"{path}: the head reads hidden states of width {config.target_hidden}, but the target's have "
            f"{given.hidden_size}; expected a head made for this target"
        )
    if wanted.vocab_size != given.vocab_size:
        raise CheckpointError(
            f"{path}: the head's vocabulary has {wanted.vocab_size} tokens, but the target's has {given.vocab_size}; "
            "expected a head made for this target"
        )
