"""Paged multi-row attention in Triton: few query rows against a long context, or a prefill chunk. Before it
the keys and values of a pass are scattered into the paged cache.

The M dimension of a tile holds the query heads that share a KV head, for several rows, so that K and V are
loaded once for all of them (tiles as in FlashAttention-2, 2307.08691). With few rows the keys are split over
programs, whose results a second kernel merges (Flash-Decoding).

A *tile* is ``(sequence, first row)``: up to ``TILE_M // GROUP`` consecutive rows of one sequence; sequence −1
is none. Scores are kept in base 2: ``exp2`` is the hardware's exponential.
"""

# ruff: noqa: N803 - constants of a compiled variant are written in capitals, as is usual in Triton
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(q, k, scale, SOFTCAP: tl.constexpr):
    """[M, N] base-2 logits of q [M, D] and k [N, D]; float32 operands are multiplied in float32, not TF32."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0.0:
        scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFTCAP)) - 1.0)
    return scores * LOG2_E


@triton.jit
def _accumulate(scores, v, acc, peak, total):
    """One step of the online softmax (1805.02867). A row that has seen no key yet has peak −∞ and total 0."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_peak, total * decay + tl.sum(weights, 1)


@triton.jit
def _isolate(values, scores):
    """Keeps a non-finite value from rows that do not see it (0 · NaN is NaN); those that do get NaN."""
    finite = tl.abs(values.to(tl.float32)) < float("inf")
    broken = tl.min(finite.to(tl.int32), 1) == 0
    return tl.where(finite, values, 0.0), tl.where(broken[None, :], float("nan"), scores)


@triton.jit(do_not_specialize=["table_width"])
def attend_paged(
    out,  # [R, HEADS_KV · GROUP, HEAD_DIM]; unused if SPLITS > 1
    partial,  # [T, HEADS_KV, SPLITS, TILE_M, HEAD_DIM] float32; unused if SPLITS == 1
    partial_lse,  # [T, HEADS_KV, SPLITS, TILE_M] float32, base 2; unused if SPLITS == 1
    q,  # [R, HEADS_KV · GROUP, HEAD_DIM], strided but for the last dimension
    k,  # [R, HEADS_KV, HEAD_DIM], likewise: this pass's own keys
    v,
    k_cache,  # [blocks, BLOCK, HEADS_KV, HEAD_DIM]
    v_cache,
    tiles,  # [T, 2] int32
    query_start,  # [S + 1] int32
    context_lens,  # [S] int32
    slots,  # [R] int32
    positions,  # [R] int64; read if WINDOW
    ancestors,  # [R] int64; read if TREE
    block_tables,  # [S, table_width] int32
    table_width,
    q_row,  # strides of q, k and v, in elements
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scale,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HIDDEN_KEYS: tl.constexpr,  # keys at the beginning of every sequence that no row sees
    TREE: tl.constexpr,
):
    """Grid (T, HEADS_KV, SPLITS): one tile, one KV head, one share of the keys."""
    tile = tl.program_id(0)
    head_kv = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(query_start + sequence)
    rows = tl.load(query_start + sequence + 1) - begin
    context = tl.load(context_lens + sequence)

    m = tl.arange(0, TILE_M)
    d = tl.arange(0, PADDED_DIM)
    n = tl.arange(0, TILE_N)
    row = first - begin + m // GROUP  # within the sequence
    real_row = (row < rows) & (m < TILE_M // GROUP * GROUP)
    real_d = d < HEAD_DIM
    head = head_kv * GROUP + m % GROUP
    q_at = (begin + row).to(tl.int64) * q_row + head * q_head
    queries = tl.load(q + q_at[:, None] + d[None, :], mask=real_row[:, None] & real_d[None, :], other=0.0)

    context_from = HIDDEN_KEYS
    new_to = rows
    if WINDOW > 0:
        position = tl.load(positions + begin + row, mask=real_row, other=2147483647).to(tl.int32)
        context_from = tl.maximum(tl.min(position, 0) - WINDOW + 1, HIDDEN_KEYS)
    if TREE:
        branch = tl.load(ancestors + begin + row, mask=real_row, other=0)
    else:
        new_to = tl.minimum(rows, first - begin + TILE_M // GROUP)

    context_tiles = tl.cdiv(tl.maximum(context - context_from, 0), TILE_N)
    all_tiles = context_tiles + tl.cdiv(new_to, TILE_N)
    share = tl.cdiv(all_tiles, SPLITS)
    share_from = split * share
    share_to = tl.minimum(share_from + share, all_tiles)

    acc = tl.zeros([TILE_M, PADDED_DIM], dtype=tl.float32)
    peak = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([TILE_M], dtype=tl.float32)

    for step in range(share_from, tl.minimum(share_to, context_tiles)):
        index = context_from + step * TILE_N + n
        real = index < context
        block = tl.load(block_tables + sequence.to(tl.int64) * table_width + index // BLOCK, mask=real, other=0)
        at = ((block.to(tl.int64) * BLOCK + index % BLOCK) * HEADS_KV + head_kv) * HEAD_DIM
        inside = real[:, None] & real_d[None, :]
        keys = tl.load(k_cache + at[:, None] + d[None, :], mask=inside, other=0.0)
        values = tl.load(v_cache + at[:, None] + d[None, :], mask=inside, other=0.0)
        scores = _scores(queries, keys, scale, SOFTCAP)
        visible = real[None, :] & real_row[:, None]
        if WINDOW > 0:
            visible = visible & (index[None, :] > position[:, None] - WINDOW)
            values, scores = _isolate(values, scores)
        scores = tl.where(visible, scores, float("-inf"))
        acc, peak, total = _accumulate(scores, values, acc, peak, total)

    for step in range(tl.maximum(share_from, context_tiles), share_to):
        index = (step - context_tiles) * TILE_N + n
        real = index < new_to
        real = real & (tl.load(slots + begin + index, mask=real, other=-1) >= 0)
        at = (begin + index).to(tl.int64)
        inside = real[:, None] & real_d[None, :]
        keys = tl.load(k + (at * k_row + head_kv * k_head)[:, None] + d[None, :], mask=inside, other=0.0)
        values = tl.load(v + (at * v_row + head_kv * v_head)[:, None] + d[None, :], mask=inside, other=0.0)
        visible = real[None, :] & real_row[:, None]
        visible = visible & (index[None, :] <= row[:, None])
        if TREE:  # −1, a chain, has all bits set
            bit = tl.minimum(index, 63).to(tl.int64)
            visible = visible & (((branch[:, None] >> bit[None, :]) & 1) != 0)
        if WINDOW > 0:
            key_position = tl.load(positions + begin + index, mask=real, other=0)
            visible = visible & (key_position[None, :] > position[:, None] - WINDOW)
        values, scores = _isolate(values, _scores(queries, keys, scale, SOFTCAP))
        scores = tl.where(visible, scores, float("-inf"))
        acc, peak, total = _accumulate(scores, values, acc, peak, total)

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLITS == 1:
        out_at = (begin + row).to(tl.int64) * (HEADS_KV * GROUP * HEAD_DIM) + head * HEAD_DIM
        stored = real_row[:, None] & real_d[None, :]
        tl.store(out + out_at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=stored)
    else:
        cell = (((tile * HEADS_KV + head_kv) * SPLITS + split) * TILE_M + m).to(tl.int64)
        stored = real_row[:, None] & real_d[None, :]
        tl.store(partial + cell[:, None] * HEAD_DIM + d[None, :], acc, mask=stored)
        tl.store(partial_lse + cell, peak + tl.log2(total), mask=real_row)


@triton.jit
def merge_splits(
    out,  # [R, HEADS_KV · GROUP, HEAD_DIM]
    partial,  # as in attend_paged
    partial_lse,
    tiles,
    query_start,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (T, HEADS_KV, TILE_M // GROUP · GROUP): one row and query head, all shares of its keys."""
    tile = tl.program_id(0)
    head_kv = tl.program_id(1)
    m = tl.program_id(2)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    row = tl.load(tiles + 2 * tile + 1) + m // GROUP
    if row >= tl.load(query_start + sequence + 1):
        return
    splits = tl.arange(0, SPLITS)
    d = tl.arange(0, PADDED_DIM)
    real_d = d < HEAD_DIM
    cell = (((tile * HEADS_KV + head_kv) * SPLITS + splits) * TILE_M + m).to(tl.int64)
    lse = tl.load(partial_lse + cell)
    peak = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    shares = tl.load(partial + cell[:, None] * HEAD_DIM + d[None, :], mask=real_d[None, :], other=0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(shares * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    out_at = (row.to(tl.int64) * HEADS_KV * GROUP + head_kv * GROUP + m % GROUP) * HEAD_DIM
    tl.store(out + out_at + d, merged.to(out.dtype.element_ty), mask=real_d)


@triton.jit
def write_kv(
    k_cache,  # [blocks, BLOCK, kv heads, head dim], slots contiguous
    v_cache,
    k,  # [R, kv heads, head dim], strided but for the last dimension
    v,
    slots,  # [R] int32; −1 = nowhere
    k_row,  # strides of k and v, in elements
    k_head,
    v_row,
    v_head,
    HEADS_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Scatters a pass's keys and values into the paged cache.

    Grid (R, ⌈HEADS_KV · HEAD_DIM / TILE⌉): one row's share of one slot, K and V.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    cell = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = cell < HEADS_KV * HEAD_DIM
    head = cell // HEAD_DIM
    d = cell % HEAD_DIM
    at = slot * (HEADS_KV * HEAD_DIM) + cell
    tl.store(k_cache + at, tl.load(k + row * k_row + head * k_head + d, mask=real), mask=real)
    tl.store(v_cache + at, tl.load(v + row * v_row + head * v_head + d, mask=real), mask=real)
