"""The weights of a decoder, ready to run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .linear import Linear
from .ops import Norm


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, ready to run."""

    attention_norm: Norm | None
    """None in the first layer of some heads, whose input is not normed, or already is."""
    qkv: Linear
    """→ [R, (heads + 2 kv heads) · head_dim]"""
    out: Linear
    up: Linear
    """→ [R, 2 intermediate] for gated MLPs (gate first), otherwise [R, intermediate]"""
    down: Linear
    window: int | None
    mlp_norm: Norm | None = None
    """None where attention and MLP run side by side behind one norm."""
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a decoder, ready to run."""

    embedding: torch.Tensor
    """[vocabulary, hidden]"""
    position_embedding: torch.Tensor | None
    """[positions, hidden], row 0 for position 0"""
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Linear
