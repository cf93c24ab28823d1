"""Rotary position embedding on CPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .simd import LANES, load, store

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


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
