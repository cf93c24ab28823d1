"""Masks of whole rows on CPU, compiled by numba: what a grammar leaves of them, and whether anything is left."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import kernel

from .cpu import Float32
from .rng import Int64

_WORD = 32
_ALL = np.int32(-1)


@kernel
def keep_set(scores: Float32, index: Int64, bits: npt.NDArray[np.int32]) -> None:
    """Sets scores[index[r], i] to −inf where bit i % 32 of bits[r, i // 32] is 0, and behind the last bit.

    Args:
        scores: [R, V], changed in place
        index: [r] rows of ``scores``
        bits: [r, W]
    """
    vocab = scores.shape[1]
    for r in range(index.size):
        row = scores[index[r]]
        for w in range(bits.shape[1]):
            word = bits[r, w]
            if word != _ALL:
                for i in range(_WORD * w, min(_WORD * (w + 1), vocab)):
                    if not (word >> (i - _WORD * w)) & 1:
                        row[i] = -np.inf
        for i in range(_WORD * bits.shape[1], vocab):
            row[i] = -np.inf


@kernel
def empty(scores: Float32, index: Int64, out: npt.NDArray[np.bool_]) -> None:
    """out[r] = whether no score of the row ``index[r]`` is above −inf.

    Args:
        scores: [R, V]
        index: [r] rows of ``scores``
        out: [r]
    """
    for r in range(index.size):
        row = scores[index[r]]
        i = 0
        while i < row.size and not row[i] > -np.inf:
            i += 1
        out[r] = i == row.size
