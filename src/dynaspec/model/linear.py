"""Linear layers: which kind a model gets, and what their weights are quantised to while they are loaded."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from dynaspec.contract.errors import ConfigError

Quantization = Literal["int8", "int4"]
"""What the weights of linear layers become: see ``kernels.integer_blocks``."""


class Linear(Protocol):
    """x [m, in] → [m, out]."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class PlainLinear:
    """``F.linear``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers are compiled ones, with weights in a form of their own."""
    return device.type == "cpu" and dtype == torch.float32


def of_head(wanted: Quantization | None) -> Quantization | None:
    """What the output layer becomes: int8 where others are int4, as it loses most by that."""
    return "int8" if wanted == "int4" else wanted


def check_quantization(wanted: Quantization | None, device: torch.device, dtype: torch.dtype) -> None:
    """
    Raises:
        ConfigError: it is not available where the model is to run.
    """
    if wanted is not None and not can_pack(device, dtype):
        raise ConfigError(
            f"quantization is {wanted!r} but the model runs on {device.type} in {str(dtype).removeprefix('torch.')}; "
            "expected no quantization, or device 'cpu' with dtype 'auto', 'float32' or 'bfloat16'"
        )


class LinearFactory:
    """Builds the linear layers of one model."""

    def __init__(self, device: torch.device, dtype: torch.dtype, product_dtype: torch.dtype | None = None) -> None:
        """
        Args:
            dtype: of activations.
            product_dtype: see ``Model``; None = the same.
        """
        self._pack = can_pack(device, dtype)
        self._rounds = product_dtype == torch.bfloat16
        self._threads = torch.get_num_threads()

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A layer for weight [out, in] and bias [out]; where layers are packed, the weight may be blocks."""
        if not self._pack:
            return PlainLinear(weight, bias)
        from .kernels.gemm import FLOAT32, best_arithmetic  # only where it is used: compiles for CPU
        from .packed import PackedLinear

        return PackedLinear(weight, bias, self._threads, best_arithmetic() if self._rounds else FLOAT32)


def row_invariant(layer: Linear, width: int) -> bool:
    """Whether rows [·, width] come out bitwise alike alone, in smaller groups and all together."""
    x = torch.randn(200, width, generator=torch.Generator().manual_seed(0))
    together = layer(x)
    return all(
        torch.equal(layer(x[first : first + rows].clone()), together[first : first + rows])
        for rows in (1, 2, 3, 5, 8, 16, 17, 32, 64, 130)
        for first in (0, len(x) - rows)
    )
