"""A pass of a decoder on CPU, from tokens to hidden states and to logits, for other compiled code to call.

The same kernels as a pass that is run from Python, so the same bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from dynaspec.model.compiled import CompiledDecoder

from .attention_work import plan_work
from .elementwise import softcap
from .layers import MATRIX, add_norm, keep, product, run

Floats = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

HEAD, FINAL_NORM = 0, MATRIX
"""Columns of ``CompiledDecoder.ends``, as those of a layer."""


@njit(cache=True, nogil=True)
def decode(
    model: CompiledDecoder,
    taps: Floats,
    tapped: Int64,
    caches: Int64,
    blocks: int,
    tokens: Int64,
    query_start: Int32,
    context_lens: Int32,
    block_tables: Int32,
    slots: Int64,
    positions: Int64,
) -> Floats:
    """[R, hidden] after the final norm, of chains of rows; writes their KV.

    Args:
        taps, tapped: see ``layers.run``; the last two of ``tapped`` are those of the sum of all layers, before and
            after the final norm.
        caches: see ``compiled.CacheAddresses``; of so many ``blocks``.
        tokens … positions: see ``ForwardBatch``.
    """
    rows, width = tokens.size, model.embedding.shape[1]
    x = np.empty((rows, width), np.float32)
    for row in range(rows):
        embedded = model.embedding[tokens[row]]
        for i in range(width):
            x[row, i] = embedded[i] * model.embedding_scale
    if model.position_embedding.shape[0]:
        for row in range(rows):
            placed = model.position_embedding[positions[row]]
            for i in range(width):
                x[row, i] += placed[i]
    heads, kv_heads, _ = model.heads
    units, chains, bounds, longest = plan_work(
        query_start, context_lens, slots, positions, False, heads, kv_heads, model.threads, model.attention_work
    )
    delta = np.zeros_like(x)
    run(
        x,
        delta,
        0,
        model.layers.shape[0],
        model.layers,
        taps,
        tapped,
        caches,
        blocks,
        model.heads,
        model.is_gated,
        model.activation,
        model.parallel,
        model.eps,
        model.cos,
        model.sin,
        model.interleaved,
        model.scale,
        model.softcap,
        model.threads,
        units,
        bounds,
        longest,
        query_start,
        context_lens,
        block_tables,
        slots,
        positions,
        np.empty(0, np.int64),
        chains,
    )
    hidden = np.empty_like(x)
    add_norm(x, delta, model.ends, FINAL_NORM, model.final_eps, hidden)
    if tapped.size:
        if tapped[-2] >= 0:
            keep(x, tapped[-2], taps, slots)
        if tapped[-1] >= 0:
            keep(hidden, tapped[-1], taps, slots)
    return hidden


@njit(cache=True, nogil=True)
def logits(model: CompiledDecoder, hidden: Floats) -> Floats:
    """[R, vocabulary] of hidden states [R, hidden]."""
    out: Floats = product(hidden, model.ends, HEAD, model.threads)
    if model.logits_softcap:
        softcap(out.reshape(-1), model.logits_softcap)
    return out


@njit(cache=True, nogil=True)
def repeat(
    model: CompiledDecoder,
    taps: Floats,
    tapped: Int64,
    caches: Int64,
    blocks: int,
    tokens: Int64,
    query_start: Int32,
    context_lens: Int32,
    block_tables: Int32,
    slots: Int64,
    positions: Int64,
    passes: int,
) -> None:
    """The same pass, with its logits, so many times: what one takes among others of a draft."""
    for _ in range(passes):
        hidden = decode(
            model, taps, tapped, caches, blocks, tokens, query_start, context_lens, block_tables, slots, positions
        )
        logits(model, hidden)
