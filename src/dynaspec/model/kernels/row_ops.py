"""Operations on rows on CPU: norms, rotary position embedding, activations of the MLP.

Each row is computed by itself. A norm reduces it in a fixed order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .functions import gelu, gelu_tanh, relu, silu, tanh
from .simd import LANES, const, fma, lane_sum, load, load_first, splat, store, store_first

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

SILU, RELU, GELU, GELU_TANH = range(4)
"""Activations by number: a closure over the function would defeat numba's cache on disk."""


@njit(cache=True, nogil=True, allocates=False)
def _rms_row(x: Floats, at: int, weight: Floats, eps: float, out: Floats, to: int) -> None:
    width = weight.size
    full = width - width % LANES
    rest = width - full
    squares = const(0.0)
    for i in range(0, full, LANES):
        part = load(x, at + i)
        squares = fma(part, part, squares)
    if rest:
        part = load_first(x, at + full, rest)
        squares = fma(part, part, squares)
    mean = lane_sum(squares) / np.float32(width)
    factor = splat(np.float32(1.0) / np.sqrt(mean + np.float32(eps)))
    for i in range(0, full, LANES):
        store(out, to + i, load(x, at + i) * factor * load(weight, i))
    if rest:
        scaled = load_first(x, at + full, rest) * factor * load_first(weight, full, rest)
        store_first(out, to + full, scaled, rest)


@njit(cache=True, nogil=True, allocates=False)
def _layer_row(x: Floats, at: int, weight: Floats, bias: Floats, eps: float, out: Floats, to: int) -> None:
    width = weight.size
    full = width - width % LANES
    rest = width - full
    total = const(0.0)
    for i in range(0, full, LANES):
        total = total + load(x, at + i)
    if rest:
        total = total + load_first(x, at + full, rest)
    mean_scalar = lane_sum(total) / np.float32(width)
    mean = splat(mean_scalar)
    squares = const(0.0)
    for i in range(0, full, LANES):
        part = load(x, at + i) - mean
        squares = fma(part, part, squares)
    variance = lane_sum(squares)
    for i in range(at + full, at + width):
        variance += (x[i] - mean_scalar) * (x[i] - mean_scalar)
    factor = splat(np.float32(1.0) / np.sqrt(variance / np.float32(width) + np.float32(eps)))
    for i in range(0, full, LANES):
        scaled = (load(x, at + i) - mean) * factor
        store(out, to + i, fma(scaled, load(weight, i), load(bias, i)))
    if rest:
        scaled = (load_first(x, at + full, rest) - mean) * factor
        shifted = fma(scaled, load_first(weight, full, rest), load_first(bias, full, rest))
        store_first(out, to + full, shifted, rest)


@njit(cache=True, nogil=True, allocates=False)
def _add_row(x: Floats, delta: Floats, at: int, width: int) -> None:
    full = width - width % LANES
    for i in range(at, at + full, LANES):
        store(x, i, load(x, i) + load(delta, i))
    if full < width:
        i = at + full
        rest = width - full
        store_first(x, i, load_first(x, i, rest) + load_first(delta, i, rest), rest)


@njit("void(f4[::1], f4[::1])", cache=True, nogil=True, allocates=False)
def add_rows(x: Floats, delta: Floats) -> None:
    """x += delta, both [R · width]."""
    _add_row(x, delta, 0, x.size)


@njit("void(f4[::1], f4[::1], f8, f4[::1])", cache=True, nogil=True, allocates=False)
def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """RMSNorm (1910.07467) of every row of x [R · width, contiguous] into ``out``."""
    for at in range(0, out.size, weight.size):
        _rms_row(x, at, weight, eps, out, at)


@njit("void(f4[::1], f4[::1], f4[::1], f8, f4[::1])", cache=True, nogil=True, allocates=False)
def add_rms_norm(x: Floats, delta: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """x += delta, then the RMS norm of x into ``out``; all [R · width]."""
    for at in range(0, out.size, weight.size):
        _add_row(x, delta, at, weight.size)
        _rms_row(x, at, weight, eps, out, at)


@njit("void(f4[::1], f4[::1], f4[::1], f8, f4[::1])", cache=True, nogil=True, allocates=False)
def layer_norm(x: Floats, weight: Floats, bias: Floats, eps: float, out: Floats) -> None:
    """LayerNorm of every row of x [R · width] into ``out``."""
    for at in range(0, out.size, weight.size):
        _layer_row(x, at, weight, bias, eps, out, at)


@njit("void(f4[::1], f4[::1], f4[::1], f4[::1], f8, f4[::1])", cache=True, nogil=True, allocates=False)
def add_layer_norm(x: Floats, delta: Floats, weight: Floats, bias: Floats, eps: float, out: Floats) -> None:
    """x += delta, then the layer norm of x into ``out``; all [R · width]."""
    for at in range(0, out.size, weight.size):
        _add_row(x, delta, at, weight.size)
        _layer_row(x, at, weight, bias, eps, out, at)


@njit("void(f4[:, :, :], f4[::1], f8)", cache=True, nogil=True, allocates=False)
def head_rms_norm(x: Floats, weight: Floats, eps: float) -> None:
    """RMS norm of every head of x [R, heads, head_dim], in place; the last dimension is contiguous."""
    rows, heads, width = x.shape
    stride = x.strides[0] // 4
    for row in range(rows):
        for head in range(heads):
            at = row * stride + head * width
            _rms_row(x, at, weight, eps, x, at)


@njit("void(f4[:, :, :], i8[::1], f4[:, ::1], f4[:, ::1], b1)", cache=True, nogil=True, allocates=False)
def rotate(x: Floats, positions: Ints, cos: Floats, sin: Floats, interleaved: bool) -> None:
    """Rotates the leading dimensions of every head of x [R, heads, head_dim, contiguous] in place.

    ``cos`` and ``sin`` are tables [positions, rotated / 2]. The pairs are (2i, 2i + 1) if ``interleaved``, otherwise
    (i, i + rotated / 2).
    """
    rows, heads, _ = x.shape
    half = cos.shape[1]
    by_row, by_head = x.strides[0] // x.itemsize, x.strides[1] // x.itemsize
    step, apart, full = (2, 1, 0) if interleaved else (1, half, half - half % LANES)
    for row in range(rows):
        position = positions[row]
        for head in range(heads):
            at, angle = row * by_row + head * by_head, position * half
            for i in range(0, full, LANES):
                first, second = load(x, at + i), load(x, at + half + i)
                cosine, sine = load(cos, angle + i), load(sin, angle + i)
                store(x, at + i, first * cosine - second * sine)
                store(x, at + half + i, second * cosine + first * sine)
            for i in range(full, half):
                one = x[row, head, step * i]
                other = x[row, head, step * i + apart]
                x[row, head, step * i] = one * cos[position, i] - other * sin[position, i]
                x[row, head, step * i + apart] = other * cos[position, i] + one * sin[position, i]


@njit(cache=True, nogil=True, allocates=False)
def _apply(kind: int, x: Any) -> Any:
    if kind == SILU:
        return silu(x)
    if kind == RELU:
        return relu(x)
    if kind == GELU:
        return gelu(x)
    return gelu_tanh(x)


@njit("void(f4[::1], i8)", cache=True, nogil=True, allocates=False)
def activate(x: Floats, kind: int) -> None:
    """Activation in place."""
    full = x.size - x.size % LANES
    for at in range(0, full, LANES):
        store(x, at, _apply(kind, load(x, at)))
    if full < x.size:
        rest = x.size - full
        store_first(x, full, _apply(kind, load_first(x, full, rest)), rest)


@njit("void(f4[::1], f8)", cache=True, nogil=True, allocates=False)
def softcap(x: Floats, cap: float) -> None:
    """cap · tanh(x / cap) in place."""
    full = x.size - x.size % LANES
    for at in range(0, full, LANES):
        store(x, at, tanh(load(x, at) / const(cap)) * const(cap))
    if full < x.size:
        rest = x.size - full
        store_first(x, full, tanh(load_first(x, full, rest) / const(cap)) * const(cap), rest)


@njit("void(f4[:, ::1], f4[:, ::1], i8)", cache=True, nogil=True, allocates=False)
def gated(gate_up: Floats, out: Floats, kind: int) -> None:
    """[R, 2 width] (gate, then up) → act(gate) · up, into ``out`` [R, width]."""
    rows, width = out.shape
    full = width - width % LANES
    rest = width - full
    for row in range(rows):
        gate = 2 * width * row
        for at in range(0, full, LANES):
            product = _apply(kind, load(gate_up, gate + at)) * load(gate_up, gate + width + at)
            store(out, width * row + at, product)
        if rest:
            at = gate + full
            product = _apply(kind, load_first(gate_up, at, rest)) * load_first(gate_up, at + width, rest)
            store_first(out, width * row + full, product, rest)


@njit("void(i8, i8, f4[:, ::1], f4[:, ::1], i8)", cache=True, nogil=True, allocates=False)
def gated_share(thread: int, threads: int, gate_up: Floats, out: Floats, kind: int) -> None:
    """One thread's rows of ``gated``."""
    first, end = out.shape[0] * thread // threads, out.shape[0] * (thread + 1) // threads
    gated(gate_up[first:end], out[first:end], kind)
