"""Scatter of a pass's keys and values into the paged cache, in Triton."""

# ruff: noqa: N803 - constants of a compiled variant are written in capitals, as is usual in Triton
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


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
    """Grid (R, ⌈HEADS_KV · HEAD_DIM / TILE⌉): one row's share of one slot, K and V."""
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
