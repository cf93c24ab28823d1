"""Heads on CPU in float32 as ``kernels.heads`` runs them. Whoever keeps one keeps its heads, too: it has the addresses
of their weights."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class CompiledMedusa(NamedTuple):
    """See ``heads.medusa``."""

    blocks: Int64
    """[heads, layers, MATRIX] see ``kernels.layers``."""
    outputs: Int64
    """[heads, MATRIX]"""
    threads: int


class CompiledMlp(NamedTuple):
    """See ``heads.mlp_speculator``."""

    embedding: Floats
    """[heads, or 1 for all of them, vocabulary, inner]"""
    embedding_scale: np.float32
    table: Int64
    """[heads, …] projection, norm and output of each; see ``kernels.heads``."""
    biases: Floats
    """[heads, inner] of the norms."""
    first_norm: Int64
    """[NORM] of the target's states; 0 = none."""
    eps: float
    threads: int


CompiledHeads = CompiledMedusa | CompiledMlp
