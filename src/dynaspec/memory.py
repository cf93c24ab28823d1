"""Large tensors of zeros that take memory as they are written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 64
"""Bytes; a cache line, and a vector register."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device, touched: int = 0) -> torch.Tensor:
    """Zeros, of which the operating system maps a CPU's pages when they are first written (``torch.zeros`` writes all).

    Args:
        touched: bytes at the beginning that are written at once.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    memory[:touched] = 0
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(tuple(shape))
