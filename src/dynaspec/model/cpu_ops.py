"""The row-wise operations on CPU in float32, by the numba kernels: the same bits for a row in any batch."""

from __future__ import annotations

import torch

from .config import MlpKind
from .kernels import elementwise, norm, rope
from .ops import Norm, RopeTable

_ACTIVATIONS: dict[MlpKind, int] = {
    "gated_silu": elementwise.SILU,
    "gated_gelu_tanh": elementwise.GELU_TANH,
    "relu": elementwise.RELU,
    "gelu": elementwise.GELU,
    "gelu_tanh": elementwise.GELU_TANH,
}


class CpuOps:
    """See ``Ops``."""

    def norm(self, x: torch.Tensor, norm_: Norm) -> torch.Tensor:
        out = torch.empty_like(x)
        flat, target = x.numpy().reshape(-1), out.numpy().reshape(-1)
        if norm_.bias is None:
            norm.rms_norm(flat, norm_.weight.numpy(), norm_.eps, target)
        else:
            norm.layer_norm(flat, norm_.weight.numpy(), norm_.bias.numpy(), norm_.eps, target)
        return out

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm_: Norm) -> torch.Tensor:
        out = torch.empty_like(x)
        flat, added, target = (tensor.numpy().reshape(-1) for tensor in (x, delta, out))
        if norm_.bias is None:
            norm.add_rms_norm(flat, added, norm_.weight.numpy(), norm_.eps, target)
        else:
            norm.add_layer_norm(flat, added, norm_.weight.numpy(), norm_.bias.numpy(), norm_.eps, target)
        return out

    def head_norm(self, x: torch.Tensor, norm_: Norm) -> None:
        norm.head_rms_norm(x.numpy(), norm_.weight.numpy(), norm_.eps)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, table: RopeTable) -> None:
        rope.rotate(x.numpy(), positions.numpy(), table.cos.numpy(), table.sin.numpy(), table.interleaved)

    def activate(self, kind: MlpKind, up: torch.Tensor) -> torch.Tensor:
        if not kind.startswith("gated"):
            elementwise.activate(up.numpy().reshape(-1), _ACTIVATIONS[kind])
            return up
        out = torch.empty(up.shape[0], up.shape[1] // 2)
        elementwise.gated(up.numpy(), out.numpy(), _ACTIVATIONS[kind])
        return out

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        elementwise.softcap(x.numpy().reshape(-1), cap)
        return x
