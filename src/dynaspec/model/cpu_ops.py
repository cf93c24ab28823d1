"""What a decoder does beside its layers, on CPU in float32: numba kernels, the same bits for a row in any batch."""

from __future__ import annotations

import torch

from .kernels import elementwise, norm
from .ops import Norm


class CpuOps:
    """See ``RowOps``."""

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm_: Norm) -> torch.Tensor:
        out = torch.empty_like(x)
        flat, added, target = (tensor.numpy().reshape(-1) for tensor in (x, delta, out))
        if norm_.bias is None:
            norm.add_rms_norm(flat, added, norm_.weight.numpy(), norm_.eps, target)
        else:
            norm.add_layer_norm(flat, added, norm_.weight.numpy(), norm_.bias.numpy(), norm_.eps, target)
        return out

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        elementwise.softcap(x.numpy().reshape(-1), cap)
        return x
