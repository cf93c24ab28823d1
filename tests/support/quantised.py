"""What quantising makes of a matrix."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from dynaspec.model.kernels import int4, int8

QUANTISERS = {"int8": int8.quantise, "int4": int4.quantise}
_KINDS = {"int8": Kind.Q8_0, "int4": Kind.Q4_1}


def blocks_of(weight: torch.Tensor, form: str) -> torch.Tensor:
    """[out, groups, bytes] the matrix's blocks."""
    return torch.from_numpy(QUANTISERS[form](weight.numpy()))


def widened(blocks: torch.Tensor, form: str, depth: int) -> torch.Tensor:
    """[out, depth] the numbers that blocks stand for, by GGUF's own package."""
    found = gguf.quants.dequantize(blocks.numpy().reshape(len(blocks), -1), _KINDS[form])
    return torch.from_numpy(np.ascontiguousarray(found[:, :depth]))


def rounded(weight: torch.Tensor, form: str = "int8") -> torch.Tensor:
    """[out, in] the numbers that the matrix's quantised weights stand for, float32."""
    return widened(blocks_of(weight, form), form, weight.shape[1])
