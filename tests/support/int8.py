"""What quantising to int8 makes of a matrix."""

from __future__ import annotations

import numpy as np
import torch

from dynaspec.model.kernels import int8


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] the numbers that the matrix's int8 weights and scales stand for, float32."""
    blocks = int8.quantise(weight.numpy()).reshape(len(weight), -1, int8.BLOCK)
    scales = blocks[:, :, :2].copy().view(np.float16).astype(np.float32)
    found = blocks[:, :, 2:].view(np.int8) * scales
    return torch.from_numpy(found.reshape(len(weight), -1)[:, : weight.shape[1]].copy())
