"""Norms on CPU. Each row is reduced by itself, in a fixed order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .simd import LANES, const, fma, lane_sum, load, load_first, splat, store, store_first

Floats = npt.NDArray[np.float32]


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
