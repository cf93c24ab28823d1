"""Heads that keep no KV on CPU, for other compiled code to call too: Medusa's and the MLP speculator's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .decode import MATRIX, NORM, norm, product
from .row_ops import GELU, SILU, activate, add_rows

Floats = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

PROJECTION, STEP_NORM, OUTPUT = 0, MATRIX, MATRIX + NORM
"""Columns of ``CompiledMlp.table``."""


class CompiledMedusa(NamedTuple):
    """Medusa heads; whoever keeps it keeps those, too: it has the addresses of their weights."""

    blocks: Int64
    """[heads, layers, MATRIX] see ``decode.product``."""
    outputs: Int64
    """[heads, MATRIX]"""
    threads: int


class CompiledMlp(NamedTuple):
    """The same of an MLP speculator."""

    embedding: Floats
    """[heads, or 1 for all of them, vocabulary, inner]"""
    embedding_scale: np.float32
    table: Int64
    """[heads, …] projection, norm and output of each, in the columns above."""
    biases: Floats
    """[heads, inner] of the norms."""
    first_norm: Int64
    """[NORM] of the target's states; 0 = none."""
    eps: float
    threads: int


CompiledHeads = CompiledMedusa | CompiledMlp


@njit(cache=True, nogil=True)
def medusa_logits(heads: CompiledMedusa, head: int, hidden: Floats) -> Floats:
    """[R, V] of one head over the target's hidden states [R, width]."""
    x = hidden.copy()
    for layer in range(heads.blocks.shape[1]):
        inner = product(x, heads.blocks[head, layer], 0, heads.threads)
        activate(inner.reshape(-1), SILU)
        add_rows(x.reshape(-1), inner.reshape(-1))
    out: Floats = product(x, heads.outputs[head], 0, heads.threads)
    return out


@njit(cache=True, nogil=True)
def mlp_begin(heads: CompiledMlp, hidden: Floats) -> Floats:
    """[R, width] the first state, of the target's hidden states [R, width]."""
    state = hidden.copy()
    if heads.first_norm[0]:
        norm(hidden, heads.first_norm, 0, heads.eps, state)
    return state


@njit(cache=True, nogil=True)
def mlp_step(heads: CompiledMlp, step: int, state: Floats, tokens: Int64) -> Floats:
    """[R, inner] the state after the newest tokens [R]."""
    row, embedding = heads.table[step], heads.embedding[step % heads.embedding.shape[0]]
    mixed: Floats = product(state, row, PROJECTION, heads.threads)
    for r in range(tokens.size):
        embedded = embedding[tokens[r]]
        for i in range(embedded.size):
            mixed[r, i] += heads.embedding_scale * embedded[i]
    norm(mixed, row, STEP_NORM, heads.eps, mixed)
    bias = heads.biases[step]
    for r in range(tokens.size):
        for i in range(bias.size):
            mixed[r, i] += bias[i]
    activate(mixed.reshape(-1), GELU)
    return mixed


@njit(cache=True, nogil=True)
def mlp_logits(heads: CompiledMlp, step: int, state: Floats) -> Floats:
    """[R, vocabulary] of the state after a step [R, inner]."""
    out: Floats = product(state, heads.table[step], OUTPUT, heads.threads)
    return out
