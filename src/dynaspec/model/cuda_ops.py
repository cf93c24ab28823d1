"""The row-wise operations on CUDA, one Triton kernel each; what is rare stays PyTorch's."""

from __future__ import annotations

import torch
from triton import next_power_of_2

from .config import MlpKind
from .kernels import triton_rows as kernels
from .ops import Norm, Ops, RopeTable

_GATES: dict[MlpKind, int] = {"gated_silu": kernels.SILU, "gated_gelu_tanh": kernels.GELU_TANH}
_GATE_TILE = 1024


class CudaOps(Ops):
    """See ``Ops``. Importing this module needs the package triton."""

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return _normalize(x, x, norm, add=False)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        return _normalize(x, delta, norm, add=True)

    def head_norm(self, x: torch.Tensor, norm: Norm) -> None:
        rows, heads, dim = x.shape
        kernels.normalize_heads[rows, heads](
            x, norm.weight, *x.stride()[:2], norm.eps, DIM=dim, TILE=next_power_of_2(dim), num_warps=1
        )

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, table: RopeTable) -> None:
        half = table.cos.shape[1]
        kernels.rotate[x.shape[:2]](
            x,
            positions,
            table.cos,
            table.sin,
            *x.stride()[:2],
            HALF=half,
            TILE=next_power_of_2(half),
            INTERLEAVED=table.interleaved,
            num_warps=1,
        )

    def activate(self, kind: MlpKind, up: torch.Tensor) -> torch.Tensor:
        if kind not in _GATES:
            return super().activate(kind, up)
        rows, width = up.shape[0], up.shape[1] // 2
        out = up.new_empty(rows, width)
        grid = (rows, -(-width // _GATE_TILE))
        kernels.gate[grid](out, up, width, ACTIVATION=_GATES[kind], TILE=_GATE_TILE)
        return out


def _normalize(x: torch.Tensor, delta: torch.Tensor, norm: Norm, add: bool) -> torch.Tensor:
    rows, width = x.shape
    tile = next_power_of_2(width)
    out = torch.empty_like(x)
    kernels.normalize[(rows,)](
        out,
        x,
        delta,
        norm.weight,
        norm.weight if norm.bias is None else norm.bias,
        width,
        norm.eps,
        ADD=add,
        CENTERED=norm.bias is not None,
        TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
    )
    return out
