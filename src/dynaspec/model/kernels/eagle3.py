"""A pass of an EAGLE-3 head on CPU, for other compiled code to call. The same kernels as a pass that is run from
Python, so the same bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from dynaspec.model.eagle3.compiled import CompiledHead

from .attention_work import plan_work
from .decode import FINAL_NORM, HEAD
from .layers import ATTENTION_NORM, MATRIX, NORM, add_norm, after_norm, norm, product, run

Floats = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

FUSION, HIDDEN_NORM, INPUT_NORM, STATE_NORMS = 0, MATRIX, MATRIX + NORM, MATRIX + 2 * NORM
"""Columns of ``CompiledHead.entrance``; a matrix or norm whose address is 0 is not there."""


@njit(cache=True, nogil=True)
def fuse(head: CompiledHead, states: Floats) -> Floats:
    """The target's hidden states [R, states · width] → [R, hidden]. Overwrites its input where it is normed."""
    entrance, width = head.entrance, head.target_hidden
    for i in range((entrance.size - STATE_NORMS) // NORM):
        part = states[:, i * width : (i + 1) * width].copy()
        norm(part, entrance, STATE_NORMS + i * NORM, head.decoder.eps, part)
        states[:, i * width : (i + 1) * width] = part
    if entrance[INPUT_NORM]:
        norm(states, entrance, INPUT_NORM, head.decoder.eps, states)
    if not entrance[FUSION]:
        return states
    fused: Floats = product(states, entrance, FUSION, head.decoder.threads)
    return fused


@njit(cache=True, nogil=True)
def head_pass(
    head: CompiledHead,
    caches: Int64,
    blocks: int,
    tokens: Int64,
    hidden: Floats,
    query_start: Int32,
    context_lens: Int32,
    block_tables: Int32,
    slots: Int64,
    positions: Int64,
) -> Floats:
    """[R, hidden] the next states, of chains of rows; writes their KV.

    Args:
        caches: see ``compiled.CacheAddresses``; of so many ``blocks``.
        tokens, query_start … positions: see ``ForwardBatch``.
        hidden: [R, hidden] the state before each token.
    """
    model = head.decoder
    rows, width = hidden.shape
    both = np.empty((rows, 2 * width), np.float32)
    embedded, normed = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)
    for row in range(rows):
        embedded[row] = model.embedding[tokens[row]]
    norm(embedded, model.layers[0], ATTENTION_NORM, model.eps, embedded)
    norm(hidden, head.entrance, HIDDEN_NORM, model.eps, normed)
    both[:, :width], both[:, width:] = embedded, normed
    x = normed.copy() if head.norm_before_residual else hidden.copy()
    heads, kv_heads, _ = model.heads
    units, chains, bounds, longest = plan_work(
        query_start, context_lens, slots, positions, False, heads, kv_heads, model.threads, model.attention_work
    )
    none = np.empty(0, np.int64)
    delta = after_norm(
        x,
        both,
        model.layers[0],
        caches[0],
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
        none,
        chains,
    )
    if model.layers.shape[0] > 1:
        run(
            x,
            delta,
            1,
            model.layers.shape[0],
            model.layers,
            np.empty((0, 0), np.float32),
            none,
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
            none,
            chains,
        )
    out = np.empty_like(x)
    add_norm(x, delta, model.ends, FINAL_NORM, model.final_eps, out)
    return out if head.norm_output else x


@njit(cache=True, nogil=True)
def head_logits(head: CompiledHead, hidden: Floats) -> Floats:
    """[R, draft vocabulary] of what a pass has returned [R, hidden]."""
    normed = hidden
    if not head.norm_output:
        normed = np.empty_like(hidden)
        norm(hidden, head.decoder.ends, FINAL_NORM, head.decoder.final_eps, normed)
    out: Floats = product(normed, head.decoder.ends, HEAD, head.decoder.threads)
    return out
