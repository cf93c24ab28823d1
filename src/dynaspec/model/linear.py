"""Linear layers. On CPU in float32: matrices packed once for MKL, with the same bits for a row whatever m is.

``F.linear`` chooses its kernel, and with it the order of summation, by the number of rows. MKL's packed GEMM does
not, and is faster for the few rows of a decoding step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

_PACK_ROWS = 32  # a hint that MKL chooses its panel sizes by
_CHECK_ROWS = 200
_CHECK_SIZES = (1, 2, 3, 5, 8, 16, 17, 32, 64, 130)


class Linear(Protocol):
    """x [m, in] → [m, out]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PlainLinear:
    """``F.linear``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """MKL's packed GEMM; keeps the packed matrix only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, min_rows: int = 1) -> None:
        """``min_rows`` 2: a single row is run twice, for shapes where MKL treats it as a vector."""
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        # The operator reads the original's shape, and its content only if the last argument is not the row count.
        self._shape_only = torch.zeros(1).expand(weight.shape)
        self._bias = bias
        self._min_rows = min_rows
        self._run: Callable[..., torch.Tensor] = torch.ops.mkl._mkl_linear.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows < self._min_rows:
            return self._run(x.repeat(2, 1), self._packed, self._shape_only, self._bias, 2)[:1]
        return self._run(x, self._packed, self._shape_only, self._bias, rows)


class LinearFactory:
    """Builds the linear layers of one model, packed where that is possible and passes the check of its shape."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._pack = device.type == "cpu" and dtype == torch.float32
        self._min_rows: dict[torch.Size, int] = {}
        if self._pack and not hasattr(torch.ops.mkl, "_mkl_linear"):
            self._give_up("this build of PyTorch has no MKL")

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A layer for weight [out, in] and bias [out]."""
        if self._pack and weight.shape not in self._min_rows:
            good = (rows for rows in (1, 2) if row_invariant(PackedLinear(weight, bias, rows), weight, bias))
            found = next(good, None)
            if found is None:
                self._give_up(f"the packed GEMM of shape {tuple(weight.shape)} depends on the number of rows")
            else:
                self._min_rows[weight.shape] = found
        if self._pack:
            return PackedLinear(weight, bias, self._min_rows[weight.shape])
        return PlainLinear(weight, bias)

    def _give_up(self, reason: str) -> None:
        self._pack = False
        logger.warning(
            "%s: using unpacked linear layers; verification is slower, and greedy output may differ between batches "
            "where two logits are equal but for rounding",
            reason[0].upper() + reason[1:],
        )


def row_invariant(layer: Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the layer is right, and rows come out bitwise alike alone, in smaller groups and all together."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_CHECK_ROWS, weight.shape[1], generator=generator)
    together = layer(x)
    if not torch.allclose(together, F.linear(x, weight, bias), rtol=1e-3, atol=1e-3 * float(together.abs().max())):
        return False
    return all(
        torch.equal(layer(x[first : first + size].clone()), together[first : first + size])
        for size in _CHECK_SIZES
        for first in (0, _CHECK_ROWS - size)
    )
