"""Activations of the MLP on CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .functions import gelu, gelu_tanh, relu, silu, tanh
from .simd import LANES, const, load, load_first, store, store_first

Floats = npt.NDArray[np.float32]

SILU, RELU, GELU, GELU_TANH = range(4)
"""Activations by number: a closure over the function would defeat numba's cache on disk."""


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
