"""Numbers from quantised tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, dequantize
from gguf import GGMLQuantizationType as Kind

_PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_QUANTISED = (
    *(Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    *(Kind.IQ4_NL, Kind.IQ4_XS),
)
KINDS = (*_PLAIN, *_QUANTISED)
"""What is read."""
_CHUNK = 1 << 15
"""Numbers that are worked on at a time: the package's arithmetic takes several times their memory, which stays in the
cache, and PyTorch rounds so few without waking its threads. A pass over whole tensors takes three times as long."""


def stored_dtype(kind: Kind) -> torch.dtype | None:
    """The dtype that a kind has as it is; None: it is quantised."""
    return _PLAIN.get(kind)


def numbers(data: npt.NDArray[np.uint8], kind: Kind, shape: tuple[int, ...], quantised: torch.dtype) -> torch.Tensor:
    """A tensor's numbers, in memory of their own.

    Args:
        data: [bytes] as stored.
        kind: one of ``KINDS``.
        quantised: what quantised numbers become, rounded to nearest; others keep their dtype.
    """
    plain = _PLAIN.get(kind)
    if plain is not None:
        return torch.from_numpy(data.copy()).view(plain).view(shape)
    out = torch.empty(shape, dtype=quantised).view(-1)
    block, size = GGML_QUANT_SIZES[kind]
    step = _CHUNK // block
    for first in range(0, data.size // size, step):
        found = torch.from_numpy(dequantize(data[first * size : (first + step) * size], kind))
        out[first * block : first * block + found.numel()] = found
    return out.view(shape)
