"""Rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

from dynaspec.train.heads.shape import HeadShape


def rotary_tables(shape: HeadShape) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim], float32, for heads whose halves rotate against each other."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    angles = torch.arange(shape.positions, dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` [rows, heads, head_dim] by the angles of its rows (cos, sin: [rows, head_dim]); dtype of ``x``."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return torch.addcmul(x * cos[:, None], turned, sin[:, None]).to(x.dtype)
