"""The row-wise operations of a decoder in Triton: one kernel each, arithmetic in float32."""

# ruff: noqa: N803 - constants of a compiled variant are written in capitals, as is usual in Triton
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

SILU = 0
GELU_TANH = 1

_GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 · √(2/π): tanh(u) = 2σ(2u) − 1
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def normalize(
    out,  # [R, width]
    x,  # [R, width]; becomes x + delta if ADD
    delta,  # [R, width]; read if ADD
    weight,  # [width]
    bias,  # [width]; read if CENTERED
    width,
    eps,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (R,): layer norm (1607.06450) if CENTERED, otherwise RMS norm (1910.07467)."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, TILE)
    real = column < width
    values = tl.load(x + row + column, mask=real, other=0.0)
    if ADD:
        values = values + tl.load(delta + row + column, mask=real, other=0.0)
        tl.store(x + row + column, values, mask=real)
    values = values.to(tl.float32)
    if CENTERED:
        values = tl.where(real, values - tl.sum(values, 0) / width, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    values = values * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    if CENTERED:
        values = values + tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row + column, values.to(out.dtype.element_ty), mask=real)


@triton.jit
def normalize_heads(
    x,  # [R, heads, DIM], strided but for the last dimension; overwritten
    weight,  # [DIM]
    row_stride,
    head_stride,
    eps,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (R, heads): RMS norm of every head."""
    at = tl.program_id(0).to(tl.int64) * row_stride + tl.program_id(1) * head_stride
    d = tl.arange(0, TILE)
    real = d < DIM
    values = tl.load(x + at + d, mask=real, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / DIM + eps)
    values = values * tl.load(weight + d, mask=real, other=0.0).to(tl.float32)
    tl.store(x + at + d, values.to(x.dtype.element_ty), mask=real)


@triton.jit
def rotate(
    x,  # [R, heads, head dim], strided but for the last dimension; overwritten
    positions,  # [R] int64
    cos,  # [positions, HALF] float32
    sin,
    row_stride,
    head_stride,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Grid (R, heads): turns the pairs (i, i + HALF), or (2i, 2i + 1) if INTERLEAVED (RoFormer, 2104.09864)."""
    row = tl.program_id(0).to(tl.int64)
    at = row * row_stride + tl.program_id(1) * head_stride
    i = tl.arange(0, TILE)
    real = i < HALF
    angle = tl.load(positions + row) * HALF + i
    c = tl.load(cos + angle, mask=real, other=0.0)
    s = tl.load(sin + angle, mask=real, other=0.0)
    if INTERLEAVED:
        first_at = x + at + 2 * i
        second_at = first_at + 1
    else:
        first_at = x + at + i
        second_at = first_at + HALF
    first = tl.load(first_at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(second_at, mask=real, other=0.0).to(tl.float32)
    tl.store(first_at, (first * c - second * s).to(x.dtype.element_ty), mask=real)
    tl.store(second_at, (second * c + first * s).to(x.dtype.element_ty), mask=real)


@triton.jit
def gate(
    out,  # [R, width]
    up,  # [R, 2 · width], the gate first
    width,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (R, ⌈width / TILE⌉): activation(gate) · up (GLU variants, 2002.05202)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = column < width
    at = up + row * 2 * width + column
    gates = tl.load(at, mask=real, other=0.0).to(tl.float32)
    values = tl.load(at + width, mask=real, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        shut = tl.sigmoid(gates)
    else:
        shut = tl.sigmoid((gates + gates * gates * gates * _GELU_CUBIC) * _GELU_SCALE)
    tl.store(out + row * width + column, (gates * shut * values).to(out.dtype.element_ty), mask=real)
