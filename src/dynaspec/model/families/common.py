"""What several families read from a config in the same way."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.model.config import MlpKind, RopeConfig

_ACTIVATIONS: dict[str, MlpKind] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_GATED: dict[str, MlpKind] = {
    "silu": "gated_silu",
    "swish": "gated_silu",
    "gelu_pytorch_tanh": "gated_gelu_tanh",
    "gelu_new": "gated_gelu_tanh",
}


class UnsupportedVariantError(Exception):
    """The family is known, but not with this config; another implementation must run it."""


def require(condition: bool, what: str) -> None:
    """Raises UnsupportedVariantError unless the condition holds."""
    if not condition:
        raise UnsupportedVariantError(what)


def activation(name: str, gated: bool) -> MlpKind:
    """The MLP kind of an activation's name in Transformers."""
    table = _GATED if gated else _ACTIVATIONS
    require(name in table, f"activation {name!r}")
    return table[name]


def length(made_for: int, wanted: int | None) -> int:
    """Longest context: what the model was made for, or less if that is wanted."""
    if wanted is None:
        return made_for
    if not 2 <= wanted <= made_for:
        raise ConfigError(f"max_model_len is {wanted}; expected 2 … {made_for}, what the checkpoint was made for")
    return wanted


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, several or none, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def end_tokens(hf: Any) -> tuple[int, ...]:
    """The end-of-sequence tokens that a config names."""
    return token_ids(getattr(hf, "eos_token_id", None))


def windows_by_type(hf: Any) -> tuple[int | None, ...]:
    """Sliding windows where ``layer_types`` names each layer's kind."""
    kinds = getattr(hf, "layer_types", None) or []
    for kind in kinds:
        require(kind in ("full_attention", "sliding_attention"), f"layer type {kind!r}")
    if "sliding_attention" not in kinds:
        return ()
    return tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def windows_everywhere(hf: Any) -> tuple[int | None, ...]:
    """The same sliding window in all layers, if the config has one."""
    window = getattr(hf, "sliding_window", None)
    return () if window is None else (window,) * hf.num_hidden_layers


def rope_parameters(hf: Any, layer_type: str | None = None) -> dict[str, Any]:
    """Rotary settings: ``rope_parameters`` of Transformers 5, or the older ``rope_theta`` and ``rope_scaling``.

    Args:
        layer_type: one of ``layer_types``, where each has settings of its own.
    """
    found: dict[str, Any] = {"rope_theta": getattr(hf, "rope_theta", None) or 10000.0}
    for name in ("rope_scaling", "rope_parameters"):
        given = dict(getattr(hf, name, None) or {})
        found |= given.get(layer_type) or given
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    require(not any(isinstance(value, Mapping) for value in found.values()), "rotary settings by layer type")
    return found


def rope(
    hf: Any, head_dim: int, max_position: int, partial: float | None = None, layer_type: str | None = None
) -> RopeConfig:
    """Rotary embedding with the scaling that the config asks for.

    Args:
        partial: share of a head that is rotated.
        layer_type: see ``rope_parameters``.
    """
    p = rope_parameters(hf, layer_type)
    share = p.get("partial_rotary_factor") or partial or getattr(hf, "partial_rotary_factor", None) or 1.0
    dim = int(head_dim * share)
    plain = [p["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)]
    kind = p["rope_type"]
    if kind == "default":
        return RopeConfig(dim, tuple(plain))
    if kind == "linear":
        return RopeConfig(dim, tuple(f / p["factor"] for f in plain))
    if kind == "llama3":
        return RopeConfig(dim, tuple(_llama3(f, p) for f in plain))
    if kind == "longrope":
        return _longrope(hf, p, dim, plain, max_position)
    raise UnsupportedVariantError(f"rotary scaling {json.dumps(kind)}")


def _llama3(frequency: float, p: Mapping[str, float]) -> float:
    """Llama 3.1: low frequencies are stretched by ``factor``, high ones kept, with a linear passage between."""
    original = p["original_max_position_embeddings"]
    turns = original * frequency / (2 * math.pi)  # over the original context
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    share = min(max((turns - low) / (high - low), 0.0), 1.0)
    return frequency * (share + (1 - share) / p["factor"])


def _longrope(hf: Any, p: dict[str, Any], dim: int, plain: list[float], max_position: int) -> RopeConfig:
    """LongRoPE (2402.13753): one of two sets of factors, chosen by the longest context that may come.

    Choosing by each request's length, as Transformers does, would change the keys that are already cached.
    """
    original = p.get("original_max_position_embeddings") or hf.original_max_position_embeddings
    factors = p["long_factor" if max_position > original else "short_factor"]
    require(len(factors) == dim // 2, f"{len(factors)} LongRoPE factors for {dim // 2} frequencies")
    amplitude = p.get("attention_factor")
    if amplitude is None:
        stretch = p.get("factor") or hf.max_position_embeddings / original
        amplitude = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    inv_freq = tuple(f / factor for f, factor in zip(plain, factors, strict=True))
    return RopeConfig(dim, inv_freq, amplitude=amplitude)
