"""A pass of a decoder on CPU in one call, from tokens to hidden states and to logits, float32.

A layer is a dozen kernels of some ten microseconds. Called one by one from Python they take as long again, and more
where the host's other work has displaced the interpreter from the caches. Other compiled code calls passes, too: the
same kernels, so the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray, types
from numba.extending import intrinsic, overload

from dynaspec.compiled import copy_row, njit, rows_at
from dynaspec.model.batch import NO_ANCESTORS, NO_KV_ONLY

from .attention_work import plan_work
from .gemm import multiply, panel_words
from .paged_attention import attend, move_kv, write_kv
from .row_ops import (
    activate,
    add_layer_norm,
    add_rms_norm,
    add_rows,
    gated,
    gated_share,
    head_rms_norm,
    layer_norm,
    rms_norm,
    rotate,
    softcap,
)
from .simd import LANES
from .team import together
from .tiles import PANEL, ROW_WORK

if TYPE_CHECKING:
    from dynaspec.model.batch import ForwardBatch
    from dynaspec.model.compiled import Addresses, CompiledDecoder

Floats = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

MATRIX = 5
"""Columns that describe a matrix: address of its panels, form and arithmetic as in ``gemm.multiply``, address of
the bias, outputs."""
QKV, OUT, UP, DOWN = range(0, 4 * MATRIX, MATRIX)
NORM = 2
"""Columns that describe a norm: addresses of weight (0: there is none) and bias (0: it is an RMS norm)."""
ATTENTION_NORM, MLP_NORM, POST_ATTENTION_NORM, POST_MLP_NORM, QUERY_NORM, KEY_NORM = range(
    4 * MATRIX, 4 * MATRIX + 6 * NORM, NORM
)
WINDOW = 4 * MATRIX + 6 * NORM
"""Column of the sliding window; 0 = none."""
HIDDEN_KEYS = WINDOW + 1
"""Column of ``AttentionSpec.hidden_keys``."""
ROTATION = HIDDEN_KEYS + 1
"""Column of the first row of ``cos`` and ``sin`` that is of the layer's table."""
HEAD, FINAL_NORM = 0, MATRIX
"""Columns of ``CompiledDecoder.ends``, as those of a layer."""
_ROWS_AT_ONCE = 96
"""Rows, about, for which a layer is computed from its attention on: what lies between its products is to stay in the
caches. 84 to 168 were about as fast as each other; this is a multiple of the rows of most tiles."""


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
    kv_only: Int32
    """Empty = none."""

    @classmethod
    def of(cls, batch: ForwardBatch) -> PassRows:
        """The rows of a batch on CPU."""
        ancestors = NO_ANCESTORS if batch.ancestors is None else batch.ancestors
        columns = batch.query_start, batch.context_lens, batch.block_tables, batch.slots, batch.positions
        return cls(batch.tokens.numpy(), *columns, ancestors, NO_KV_ONLY if batch.kv_only is None else batch.kv_only)


class PassWork(NamedTuple):
    """What ``paged_attention.attend`` needs of a pass, in its order."""

    units: Int32
    bounds: Int64
    kept: Int64
    query_start: Int32
    context_lens: Int32
    block_tables: Int32
    slots: Int64
    positions: Int64
    ancestors: Int64
    chains: npt.NDArray[np.bool_]


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


@njit(cache=True, nogil=True)
def norm(x: Floats, layer: Int64, which: int, eps: float, out: Floats) -> None:
    """A norm of every row of x [R, width] into ``out``, which may be x."""
    width = x.shape[1]
    weight = carray(_pointer(layer[which]), (width,), np.float32)
    if layer[which + 1]:
        bias = carray(_pointer(layer[which + 1]), (width,), np.float32)
        layer_norm(x.reshape(-1), weight, bias, eps, out.reshape(-1))
    else:
        rms_norm(x.reshape(-1), weight, eps, out.reshape(-1))


@njit(cache=True, nogil=True, apart=True)
def _add_norm_share(
    thread: int, threads: int, x: Floats, delta: Floats, layer: Int64, which: int, eps: float, out: Floats
) -> None:
    """One thread's rows of ``add_norm``."""
    rows, width = x.shape
    first, end = rows * thread // threads, rows * (thread + 1) // threads
    own, added, normed = x[first:end].reshape(-1), delta[first:end].reshape(-1), out[first:end].reshape(-1)
    weight = carray(_pointer(layer[which]), (width,), np.float32)
    if layer[which + 1]:
        bias = carray(_pointer(layer[which + 1]), (width,), np.float32)
        add_layer_norm(own, added, weight, bias, eps, normed)
    else:
        add_rms_norm(own, added, weight, eps, normed)


@njit(cache=True, nogil=True)
def add_norm(x: Floats, delta: Floats, layer: Int64, which: int, eps: float, out: Floats, threads: int) -> None:
    """x += delta, then its norm into ``out``."""
    if threads == 1 or x.size < ROW_WORK:
        _add_norm_share(0, 1, x, delta, layer, which, eps, out)
    else:
        together(_add_norm_share, threads, (x, delta, layer, which, eps, out))


@njit(cache=True, nogil=True, apart=True)
def product(x: Floats, layer: Int64, which: int, threads: int) -> Floats:
    """x [R, in] times a matrix → [R, out], contiguous."""
    rows, depth = x.shape
    form, arithmetic, width = layer[which + 1], layer[which + 2], layer[which + 4]
    panels = (width + PANEL - 1) // PANEL
    padded = panels * PANEL
    weights = carray(_pointer(layer[which]), (panels * panel_words(depth, form),), np.uint32)
    bias = carray(_pointer(layer[which + 3]), (padded,), np.float32)
    out = np.empty((rows, padded), np.float32)
    multiply(x, weights, form, arithmetic, bias, out, threads)
    if padded == width:
        return out
    dense = np.empty((rows, width), np.float32)
    for row in range(rows):
        for i in range(width):
            dense[row, i] = out[row, i]
    return dense


@njit(cache=True, nogil=True)
def _mlp(h: Floats, layer: Int64, is_gated: bool, activation: int, threads: int) -> Floats:
    up = product(h, layer, UP, threads)
    if is_gated:
        inner = np.empty((up.shape[0], up.shape[1] // 2), np.float32)
        if threads == 1 or inner.size < ROW_WORK:
            gated(up, inner, activation)
        else:
            together(gated_share, threads, (up, inner, activation))
    else:
        inner = up
        activate(inner.reshape(-1), activation)
    out: Floats = product(inner, layer, DOWN, threads)
    return out


@njit(cache=True, nogil=True)
def _keep(x: Floats, at: int, taps: Floats, slots: Int64) -> None:
    """Writes x [R, width] into ``taps`` [slots, …] from column ``at`` on; rows with slot −1 are skipped."""
    for row in range(x.shape[0]):
        if slots[row] >= 0:
            copy_row(x[row], taps[slots[row], at : at + x.shape[1]])


def _cache(address: int, shape: tuple[int, int, int, int]) -> Any:
    """The cache at an address, of the dtype that the address's type says, see ``CacheAddresses``."""


@overload(_cache)
def _cache_of(address: Any, shape: Any) -> Any:
    dtype = np.uint16 if address == types.uint64 else np.float32

    def cache(address: Any, shape: Any) -> Any:
        return carray(_pointer(address), shape, dtype)

    return cache


@njit(cache=True, nogil=True)
def _caches(model: CompiledDecoder, caches: Addresses, blocks: int) -> tuple[Any, Any]:
    """A layer's key and value cache, of ``caches`` [2] addresses."""
    _, kv_heads, head_dim = model.heads
    padded = (head_dim + LANES - 1) // LANES * LANES
    keys = _cache(caches[0], (blocks, kv_heads, (head_dim + 1) // 2 * 2, LANES))
    return keys, _cache(caches[1], (blocks, kv_heads, LANES, padded))


@njit(cache=True, nogil=True)
def move(model: CompiledDecoder, caches: Addresses, blocks: int, source: Int64, target: Int64) -> None:
    """``paged_attention.move_kv`` in every layer.

    Args:
        caches, blocks: see ``run_layers``.
    """
    for index in range(model.layers.shape[0]):
        k_cache, v_cache = _caches(model, caches[index], blocks)
        move_kv(k_cache, v_cache, source, target)


@njit(cache=True, nogil=True, apart=True)
def _qkv_share(
    thread: int,
    threads: int,
    qkv: Floats,
    query_heads: int,
    layer: Int64,
    eps: float,
    positions: Int64,
    cos: Floats,
    sin: Floats,
    interleaved: bool,
    k_cache: Any,
    v_cache: Any,
    slots: Int64,
) -> None:
    """One thread's rows of qkv [R, query heads + 2 kv heads, head_dim]: norms and rotates queries and keys in place,
    and writes keys and values into the caches."""
    rows, _, head_dim = qkv.shape
    first, end = rows * thread // threads, rows * (thread + 1) // threads
    own, values_from = qkv[first:end], query_heads + k_cache.shape[1]
    q, k = own[:, :query_heads], own[:, query_heads:values_from]
    if layer[QUERY_NORM]:
        head_rms_norm(q, carray(_pointer(layer[QUERY_NORM]), (head_dim,), np.float32), eps)
        head_rms_norm(k, carray(_pointer(layer[KEY_NORM]), (head_dim,), np.float32), eps)
    if cos.shape[1]:
        start = layer[ROTATION]
        rotate(own[:, :values_from], positions[first:end], cos[start:], sin[start:], interleaved)
    write_kv(k, own[:, values_from:], k_cache, v_cache, slots[first:end])


@njit(cache=True, nogil=True, apart=True)
def _after_attention(model: CompiledDecoder, x: Floats, h: Floats, attended: Floats, layer: Int64) -> Floats:
    """[R, hidden] what the layer wants to add, of some rows: here they have nothing to do with each other. See
    ``_after_kv``."""
    out = product(attended, layer, OUT, model.threads)
    if model.parallel or not layer[MLP_NORM]:
        if layer[MLP_NORM]:
            norm(x, layer, MLP_NORM, model.eps, h)
        both: Floats = _mlp(h, layer, model.is_gated, model.activation, model.threads)
        add_rows(both.reshape(-1), out.reshape(-1))
        return both
    if layer[POST_ATTENTION_NORM]:
        norm(out, layer, POST_ATTENTION_NORM, model.eps, out)
    inner = np.empty_like(x)
    add_norm(x, out, layer, MLP_NORM, model.eps, inner, model.threads)
    last: Floats = _mlp(inner, layer, model.is_gated, model.activation, model.threads)
    if layer[POST_MLP_NORM]:
        norm(last, layer, POST_MLP_NORM, model.eps, last)
    return last


@njit(cache=True, nogil=True, apart=True)
def _write_kv(
    model: CompiledDecoder, h: Floats, layer: Int64, caches: Addresses, blocks: int, positions: Int64, slots: Int64
) -> Floats:
    """[R, query heads + 2 kv heads, head_dim] of a layer's normed input ``h``; writes the keys and values."""
    query_heads, kv_heads, head_dim = model.heads
    qkv: Floats = product(h, layer, QKV, model.threads).reshape(h.shape[0], query_heads + 2 * kv_heads, head_dim)
    k_cache, v_cache = _caches(model, caches, blocks)
    arguments = (
        qkv, query_heads, layer, model.eps, positions, model.cos, model.sin, model.interleaved, k_cache, v_cache, slots,
    )  # fmt: skip
    if model.threads == 1 or qkv.size < ROW_WORK:
        _qkv_share(0, 1, *arguments)
    else:
        together(_qkv_share, model.threads, arguments)
    return qkv


@njit(cache=True, nogil=True, apart=True)
def _after_kv(
    model: CompiledDecoder,
    x: Floats,
    h: Floats,
    qkv: Floats,
    delta: Floats,
    layer: Int64,
    caches: Addresses,
    blocks: int,
    work: PassWork,
) -> None:
    """One layer from its attention on, see ``run_layers``.

    Args:
        x: [R, hidden] in and out.
        h: [R, in] the layer's normed input; overwritten where as wide as ``x``.
        qkv: [R, …] what ``_write_kv`` made of that.
        delta: [R, hidden] out: what the layer wants to add.
        layer: its row of ``model.layers``.
        caches: [2] addresses of its key and its value cache.
    """
    query_heads, _, head_dim = model.heads
    rows = x.shape[0]
    attended = np.empty((rows, query_heads * head_dim), np.float32)
    k_cache, v_cache = _caches(model, caches, blocks)
    settings = model.scale, model.softcap, layer[WINDOW], layer[HIDDEN_KEYS]
    attend(qkv[:, :query_heads], k_cache, v_cache, attended, *work[:], *settings)  # [:]: numba joins plain tuples only
    parts = max(1, (rows + _ROWS_AT_ONCE // 2) // _ROWS_AT_ONCE)
    for part in range(parts):
        first, end = rows * part // parts, rows * (part + 1) // parts
        wanted = _after_attention(model, x[first:end], h[first:end], attended[first:end], layer)
        copy_row(wanted.reshape(-1), delta[first:end].reshape(-1))


@njit(cache=True, nogil=True)
def _places_read(rows: PassRows) -> Int64:
    """The rows that are not there for their KV only."""
    places, n = np.empty(rows.slots.size, np.int64), 0
    for s in range(rows.kv_only.size):
        for row in range(rows.query_start[s] + rows.kv_only[s], rows.query_start[s + 1]):
            places[n] = row
            n += 1
    return places[:n]


@njit(cache=True, nogil=True)
def _at(numbers: Int64, places: Int64) -> Int64:
    """Some of the numbers [R], if there are any."""
    found = np.empty(places.size if numbers.size else 0, np.int64)
    for i in range(found.size):
        found[i] = numbers[places[i]]
    return found


@njit(cache=True, nogil=True)
def _rows_read(rows: PassRows, places: Int64) -> PassRows:
    """A pass of those rows alone, in whose context the others are."""
    start, context = np.zeros_like(rows.query_start), rows.context_lens.copy()
    for s in range(context.size):
        start[s + 1] = start[s] + rows.query_start[s + 1] - rows.query_start[s] - rows.kv_only[s]
        context[s] += rows.kv_only[s]
    return PassRows(
        _at(rows.tokens, places), start, context, rows.block_tables, _at(rows.slots, places),
        _at(rows.positions, places), _at(rows.ancestors, places), rows.kv_only[:0],
    )  # fmt: skip


@njit(cache=True, nogil=True, apart=True)
def run_layers(
    model: CompiledDecoder,
    x: Floats,
    h: Floats,
    taps: Floats,
    tapped: Int64,
    caches: Addresses,
    blocks: int,
    rows: PassRows,
) -> tuple[Floats, Floats]:
    """All layers, one after the other. Rows that are there for their KV only leave the last one when that is written.

    Args:
        x: [R, hidden] the sum that all layers add to; overwritten.
        h: [R, in] the first layer's normed input; overwritten.
        taps, tapped: see ``taps.Taps``: what enters layer i is kept from column ``tapped[i]`` on; −1 = it is not. Empty
            = nothing is.
        caches: [layers, 2] addresses of the key and the value cache.
        blocks: KV blocks.

    Returns:
        [R, hidden] the sum before the last layer, and what that wants to add, without the rows of ``rows.kv_only``.
    """
    work, delta = attention_of(model, rows), np.empty_like(x)
    for index in range(model.layers.shape[0]):
        layer = model.layers[index]
        if index == 1:
            h = np.empty_like(x)  # the first layer's may be wider, or x itself
        if index:
            add_norm(x, delta, layer, ATTENTION_NORM, model.eps, h, model.threads)
        if tapped.size and tapped[index] >= 0:
            _keep(x, tapped[index], taps, rows.slots)
        qkv = _write_kv(model, h, layer, caches[index], blocks, rows.positions, rows.slots)
        if rows.kv_only.size and index + 1 == model.layers.shape[0]:
            places = _places_read(rows)
            x, h, delta = rows_at(x, places), rows_at(h, places), np.empty((places.size, x.shape[1]), np.float32)
            if not places.size:
                return x, delta
            qkv = rows_at(qkv.reshape(len(qkv), -1), places).reshape(places.size, *qkv.shape[1:])
            work = attention_of(model, _rows_read(rows, places))
        _after_kv(model, x, h, qkv, delta, layer, caches[index], blocks, work)
    return x, delta


@njit(cache=True, nogil=True)
def attention_of(model: CompiledDecoder, rows: PassRows) -> PassWork:
    """The work of attention in a pass."""
    heads, kv_heads, _ = model.heads
    start, context, slots, positions, ancestors = (
        rows.query_start, rows.context_lens, rows.slots, rows.positions, rows.ancestors
    )  # fmt: skip
    units, chains, bounds, kept = plan_work(
        start, context, slots, positions, ancestors, heads, kv_heads, model.threads, model.attention_work
    )
    return PassWork(units, bounds, kept, start, context, rows.block_tables, slots, positions, ancestors, chains)


@njit(cache=True, nogil=True, apart=True)
def decode(
    model: CompiledDecoder, taps: Floats, tapped: Int64, caches: Addresses, blocks: int, rows: PassRows
) -> Floats:
    """[R, hidden] after the final norm, without the rows of ``rows.kv_only``; writes the rows' KV.

    Args:
        taps, tapped: see ``run_layers``; the last two of ``tapped`` are those of the sum of all layers, before and
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
    h = np.empty_like(x)
    add_norm(x, np.zeros_like(x), model.layers[0], ATTENTION_NORM, model.eps, h, model.threads)
    computed = rows
    if tapped.size and max(tapped[-2], tapped[-1]) >= 0:  # somebody keeps what comes out, of every row
        start, context, ancestors = rows.query_start, rows.context_lens, rows.ancestors
        computed = PassRows(tokens, start, context, rows.block_tables, slots, positions, ancestors, rows.kv_only[:0])
    x, delta = run_layers(model, x, h, taps, tapped, caches, blocks, computed)
    hidden: Floats = np.empty_like(x)
    add_norm(x, delta, model.ends, FINAL_NORM, model.final_eps, hidden, model.threads)
    if tapped.size:
        if tapped[-2] >= 0:
            _keep(x, tapped[-2], taps, slots)
        if tapped[-1] >= 0:
            _keep(hidden, tapped[-1], taps, slots)
    if computed.kv_only.size < rows.kv_only.size:
        hidden = rows_at(hidden, _places_read(rows))
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
