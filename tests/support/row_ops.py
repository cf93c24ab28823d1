"""Checks of a decoder's row-wise operations against plain PyTorch, on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynaspec.model.config import RopeConfig
from dynaspec.model.ops import Norm, Ops, RopeTable


def _norm(width: int, bias: bool, like: dict[str, Any]) -> Norm:
    return Norm(torch.randn(width, **like), torch.randn(width, **like) if bias else None, 1e-5)


def add_norms(ops: Ops, like: dict[str, Any]) -> list[torch.Tensor]:
    outputs = []
    for width, bias in ((96, False), (96, True), (600, False)):
        norm = _norm(width, bias, like)
        x, delta = torch.randn(2, 3, width, **like)
        outputs += [ops.norm(x, norm), ops.add_norm(x, delta, norm), x]
    return outputs


def head_norms(ops: Ops, like: dict[str, Any]) -> list[torch.Tensor]:
    x = torch.randn(3, 7, 80, **like)
    ops.head_norm(x[:, 2:5], _norm(80, False, like))
    return [x]


def rotations(ops: Ops, like: dict[str, Any]) -> list[torch.Tensor]:
    outputs = []
    positions = torch.tensor([0, 5, 31], device=like["device"])
    for dim, interleaved in ((32, False), (32, True), (24, False)):
        inv_freq = tuple(10000 ** (-2 * i / dim) for i in range(dim // 2))
        table = RopeTable.build(RopeConfig(dim, inv_freq, interleaved=interleaved), 32, like["device"])
        x = torch.randn(3, 7, 32, **like)
        ops.rotate(x[:, 1:5], positions, table)
        outputs.append(x)
    return outputs


def activations(ops: Ops, like: dict[str, Any]) -> list[torch.Tensor]:
    kinds = ("gated_silu", "gated_gelu_tanh", "relu", "gelu", "gelu_tanh")
    return [ops.activate(kind, 3 * torch.randn(3, 1100, **like)) for kind in kinds]


CHECKS: list[Callable[[Ops, dict[str, Any]], list[torch.Tensor]]] = [add_norms, head_norms, rotations, activations]


def assert_same(
    check: Callable[[Ops, dict[str, Any]], list[torch.Tensor]], ops: Ops, device: str, dtype: torch.dtype
) -> None:
    """``ops`` on random rows gives what ``Ops`` gives, to the rounding of ``dtype``."""
    like = {"device": torch.device(device), "dtype": dtype}
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.manual_seed(0)
    found = check(ops, like)
    torch.manual_seed(0)
    for mine, plain in zip(found, check(Ops(), like), strict=True):
        torch.testing.assert_close(mine, plain, rtol=4 * tolerance, atol=4 * tolerance)
