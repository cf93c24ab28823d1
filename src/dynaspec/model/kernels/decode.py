"""A pass of a decoder on CPU, from tokens to hidden states and to logits, for other compiled code to call.

The same kernels as a pass that is run from Python, so the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit
from dynaspec.model.batch import NO_ANCESTORS

from .attention_work import plan_work
from .elementwise import softcap
from .layers import MATRIX, PassWork, add_norm, keep, product, run

if TYPE_CHECKING:
    from dynaspec.model.batch import ForwardBatch
    from dynaspec.model.compiled import Addresses, CompiledDecoder

Floats = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

HEAD, FINAL_NORM = 0, MATRIX
"""Columns of ``CompiledDecoder.ends``, as those of a layer."""


class PassRows(NamedTuple):
    """See ``ForwardBatch``."""

    tokens: Int64
    query_start: Int32
    context_lens: Int32
    block_tables: Int32
    slots: Int64
    positions: Int64
    ancestors: Int64
    """Empty = −1 throughout."""

    @classmethod
    def of(cls, batch: ForwardBatch) -> PassRows:
        """The rows of a batch on CPU."""
        ancestors = NO_ANCESTORS if batch.ancestors is None else batch.ancestors
        columns = batch.query_start, batch.context_lens, batch.block_tables, batch.slots, batch.positions
        return cls(batch.tokens.numpy(), *columns, ancestors)


@njit(cache=True, nogil=True)
def attention_of(model: CompiledDecoder, rows: PassRows) -> PassWork:
    """The work of attention in a pass."""
    _, start, context, tables, slots, positions, ancestors = rows
    heads, kv_heads, _ = model.heads
    units, chains, bounds, kept = plan_work(
        start, context, slots, positions, ancestors, heads, kv_heads, model.threads, model.attention_work
    )
    return PassWork(units, bounds, kept, start, context, tables, slots, positions, ancestors, chains)


@njit(cache=True, nogil=True, apart=True)
def decode(
    model: CompiledDecoder, taps: Floats, tapped: Int64, caches: Addresses, blocks: int, rows: PassRows
) -> Floats:
    """[R, hidden] after the final norm; writes the rows' KV.

    Args:
        taps, tapped: see ``layers.run``; the last two of ``tapped`` are those of the sum of all layers, before and
            after the final norm.
        caches: see ``compiled.CacheAddresses``; of so many ``blocks``.
    """
    tokens, slots, positions, width = rows.tokens, rows.slots, rows.positions, model.embedding.shape[1]
    x = np.empty((tokens.size, width), np.float32)
    for row in range(tokens.size):
        embedded = model.embedding[tokens[row]]
        for i in range(width):
            x[row, i] = embedded[i] * model.embedding_scale
    if model.position_embedding.shape[0]:
        for row in range(tokens.size):
            placed = model.position_embedding[positions[row]]
            for i in range(width):
                x[row, i] += placed[i]
    delta = np.zeros_like(x)
    layers = np.arange(model.layers.shape[0])
    run(model, x, delta, layers, taps, tapped, caches, blocks, attention_of(model, rows))
    hidden = np.empty_like(x)
    add_norm(x, delta, model.ends, FINAL_NORM, model.final_eps, hidden, model.threads)
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
    model: CompiledDecoder, taps: Floats, tapped: Int64, caches: Addresses, blocks: int, rows: PassRows, passes: int
) -> None:
    """The same pass, with its logits, so many times: what one takes among others of a draft."""
    for _ in range(passes):
        logits(model, decode(model, taps, tapped, caches, blocks, rows))
