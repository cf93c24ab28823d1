"""The elementwise and row-wise operations of a decoder, in PyTorch for any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .config import DecoderConfig, MlpKind, RopeConfig


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension: layer norm if it has a bias, RMS norm otherwise."""

    weight: torch.Tensor
    """[width]; an offset from 1 has been resolved."""
    bias: torch.Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Sine and cosine for every position, [positions, rotated / 2] float32."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    @staticmethod
    def build(rope: RopeConfig, positions: int, device: torch.device) -> RopeTable:
        """Rounded like Transformers': the angle is a float32 product."""
        angles = torch.arange(positions).float()[:, None] * torch.tensor(rope.inv_freq)[None, :]
        cos, sin = (table * rope.amplitude for table in (angles.cos(), angles.sin()))
        return RopeTable(cos.to(device), sin.to(device), rope.interleaved)

    @staticmethod
    def of(config: DecoderConfig, device: torch.device) -> list[RopeTable]:
        """That of a decoder's layers, and a second one where those with a sliding window have their own; none at all
        without rotation."""
        ropes = (config.rope, config.local_rope)
        return [RopeTable.build(rope, config.max_position, device) for rope in ropes if rope is not None]


class Ops:
    """What a decoder does beside its products and its attention, in plain PyTorch: any device and dtype.

    Shapes: x, delta [R, width], contiguous.
    """

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The norm of every row of x [R, width]."""
        wide = x.to(norm.weight.dtype)
        if norm.bias is not None:
            return F.layer_norm(wide, norm.weight.shape, norm.weight, norm.bias, norm.eps).to(x.dtype)
        return F.rms_norm(wide, norm.weight.shape, norm.weight, norm.eps).to(x.dtype)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Adds ``delta`` to ``x`` in place; returns the norm of the sum."""
        x += delta
        return self.norm(x, norm)

    def head_norm(self, x: torch.Tensor, norm: Norm) -> None:
        """RMS norm of every head of x [R, heads, head_dim], in place."""
        x.copy_(self.norm(x, norm))

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, table: RopeTable) -> None:
        """Rotary embedding of x [R, heads, head_dim], in place."""
        cos, sin = table.cos[positions][:, None, :], table.sin[positions][:, None, :]
        half = cos.shape[-1]
        rotated = x[..., : 2 * half]
        if table.interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated[..., :half], rotated[..., half:]
        turned = first * cos - second * sin, second * cos + first * sin
        first.copy_(turned[0])
        second.copy_(turned[1])

    def activate(self, kind: MlpKind, up: torch.Tensor) -> torch.Tensor:
        """[R, 2 width] (gate, then up) → [R, width] for gated kinds, otherwise [R, width] → [R, width].

        May overwrite its input.
        """
        if kind == "gated_silu":
            gate, up = up.chunk(2, -1)
            return F.silu(gate) * up
        if kind == "gated_gelu_tanh":
            gate, up = up.chunk(2, -1)
            return F.gelu(gate, approximate="tanh") * up
        if kind == "relu":
            return F.relu(up)
        return F.gelu(up, approximate="tanh" if kind == "gelu_tanh" else "none")

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap · tanh(x / cap) of x [R, width]; may overwrite its input."""
        return cap * torch.tanh(x / cap)
