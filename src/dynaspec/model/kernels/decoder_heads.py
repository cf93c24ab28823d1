"""A pass of a head on CPU, for other compiled code to call. The same kernels as a pass that is run from Python, so the
same bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import copy_row, njit
from dynaspec.model.compiled import Addresses, CompiledDecoder
from dynaspec.model.decoder_heads.config import FIRST_POSITION

from .decode import (
    ATTENTION_NORM,
    FINAL_NORM,
    HEAD,
    MATRIX,
    NORM,
    PassRows,
    add_norm,
    norm,
    product,
    run_layers,
)
from .row_ops import add_rows

Floats = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

FUSION, PROJECTION = 0, MATRIX
HIDDEN_NORM, EMBEDDING_NORM, INPUT_NORM, STATE_NORMS = range(2 * MATRIX, 2 * MATRIX + 4 * NORM, NORM)
"""Columns of ``CompiledHead.entrance``; a matrix or norm whose address is 0 is not there."""


class CompiledHead(NamedTuple):
    """All that compiled code needs to run a head. Whoever keeps it keeps the head, too: it has the addresses of its
    weights."""

    decoder: CompiledDecoder
    entrance: Int64
    """[STATE_NORMS + …] fusion matrix, projection, norms of the hidden state, of the embedding, of all states, and of
    single ones, in the columns above."""
    target_hidden: int
    hidden_first: bool
    zero_first: bool
    norm_before_residual: bool
    norm_output: bool


@njit(cache=True, nogil=True, apart=True)
def fuse(head: CompiledHead, states: Floats) -> Floats:
    """The target's hidden states [R, states · width] → [R, hidden]. Overwrites its input where it is normed."""
    entrance, width = head.entrance, head.target_hidden
    for i in range((entrance.size - STATE_NORMS) // NORM):
        part = states[:, i * width : (i + 1) * width].copy()
        norm(part, entrance, STATE_NORMS + i * NORM, head.decoder.eps, part)
        for row in range(len(part)):
            copy_row(part[row], states[row, i * width : (i + 1) * width])
    if entrance[INPUT_NORM]:
        norm(states, entrance, INPUT_NORM, head.decoder.eps, states)
    if not entrance[FUSION]:
        return states
    fused: Floats = product(states, entrance, FUSION, head.decoder.threads)
    return fused


@njit(cache=True, nogil=True, apart=True)
def head_pass(head: CompiledHead, caches: Addresses, blocks: int, rows: PassRows, hidden: Floats) -> Floats:
    """[R, hidden] the next states, without those of the rows ``rows.kv_only``; writes the rows' KV.

    Args:
        caches: see ``compiled.CacheAddresses``; of so many ``blocks``.
        hidden: [R, hidden] the state before each token.
    """
    model, entrance = head.decoder, head.entrance
    size, width = hidden.shape
    both, embedded = np.empty((size, 2 * width), np.float32), np.empty((size, width), np.float32)
    for row in range(size):
        if head.zero_first and rows.positions[row] == FIRST_POSITION:
            embedded[row] = 0.0
        else:
            copy_row(model.embedding[rows.tokens[row]], embedded[row])
    if entrance[EMBEDDING_NORM]:
        norm(embedded, entrance, EMBEDDING_NORM, model.eps, embedded)
    normed = hidden
    if entrance[HIDDEN_NORM]:
        normed = np.empty_like(hidden)
        norm(hidden, entrance, HIDDEN_NORM, model.eps, normed)
    left, right = (normed, embedded) if head.hidden_first else (embedded, normed)
    for row in range(size):
        copy_row(left[row], both[row, :width])
        copy_row(right[row], both[row, width:])
    first = model.layers[0]
    x: Floats
    if entrance[PROJECTION]:
        x = product(both, entrance, PROJECTION, model.threads)
        h = x  # which changes only after the layer has read it
        if first[ATTENTION_NORM]:
            h = np.empty_like(x)
            norm(x, first, ATTENTION_NORM, model.eps, h)
    else:
        x, h = normed.copy() if head.norm_before_residual else hidden.copy(), both
    no_taps, nowhere = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    x, delta = run_layers(model, x, h, no_taps, nowhere, caches, blocks, rows)
    if head.norm_output:
        out: Floats = np.empty_like(x)
        add_norm(x, delta, model.ends, FINAL_NORM, model.final_eps, out, model.threads)
        return out
    add_rows(x.reshape(-1), delta.reshape(-1))
    return x


@njit(cache=True, nogil=True)
def head_logits(head: CompiledHead, hidden: Floats) -> Floats:
    """[R, draft vocabulary] of what a pass has returned [R, hidden]."""
    normed = hidden
    if head.decoder.ends[FINAL_NORM] and not head.norm_output:
        normed = np.empty_like(hidden)
        norm(hidden, head.decoder.ends, FINAL_NORM, head.decoder.final_eps, normed)
    out: Floats = product(normed, head.decoder.ends, HEAD, head.decoder.threads)
    return out
