"""Linear layers on CPU: matrices packed once, the same bits for a row however many rows there are.

``F.linear`` chooses its kernel, and with it the order of summation, by the number of rows.
"""

from __future__ import annotations

import numpy as np
import torch

from .kernels import gemm
from .kernels.integer_blocks import INT4_BLOCK, pack_int4, pack_int8
from .kernels.team import team_size
from .kernels.tiles import PANEL


class PackedLinear:
    """Products of float32 rows with packed weights, of which no other copy is kept."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, threads: int, arithmetic: int = gemm.FLOAT32
    ) -> None:
        """
        Args:
            weight: [out, in] float32; or blocks [out, groups, bytes] of ``kernels.integer_blocks``.
            bias: [out]
            arithmetic: of a weight that is not blocks, see ``kernels.gemm``; with all but ``FLOAT32`` it is rounded to
                bfloat16.
        """
        self.width = weight.shape[0]
        self.arithmetic = arithmetic
        if weight.dtype == torch.uint8 and weight.shape[2] == INT4_BLOCK:
            self.packed, self.form = pack_int4(weight.numpy()), gemm.INT4
        elif weight.dtype == torch.uint8:
            self.packed, self.form = pack_int8(weight.numpy()), gemm.INT8
        else:
            kept = weight if arithmetic == gemm.FLOAT32 else weight.bfloat16().float()
            self.packed, self.form = gemm.pack(kept.numpy(), arithmetic)
        self._weights = self.packed.reshape(-1)
        self._padded = self.packed.shape[0] * PANEL
        self.bias = np.zeros(self._padded, np.float32)
        if bias is not None:
            self.bias[: self.width] = bias.numpy()
        self._threads = team_size(threads)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.contiguous().numpy()
        out = np.empty((rows.shape[0], self._padded), np.float32)
        gemm.multiply(rows, self._weights, self.form, self.arithmetic, self.bias, out, self._threads)
        result = torch.from_numpy(out)
        return result if self._padded == self.width else result[:, : self.width].contiguous()
