"""Rotary position embedding on CPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@njit("void(f4[:, :, :], i8[::1], f4[:, ::1], f4[:, ::1], b1)", cache=True, nogil=True, allocates=False)
def rotate(x: Floats, positions: Ints, cos: Floats, sin: Floats, interleaved: bool) -> None:
    """Rotates the leading dimensions of every head of x [R, heads, head_dim] in place.

    ``cos`` and ``sin`` are tables [positions, rotated / 2]. The pairs are (2i, 2i + 1) if ``interleaved``, otherwise
    (i, i + rotated / 2).
    """
    rows, heads, _ = x.shape
    half = cos.shape[1]
    step, apart = (2, 1) if interleaved else (1, half)
    for row in range(rows):
        position = positions[row]
        for head in range(heads):
            for i in range(half):
                first = x[row, head, step * i]
                second = x[row, head, step * i + apart]
                x[row, head, step * i] = first * cos[position, i] - second * sin[position, i]
                x[row, head, step * i + apart] = second * cos[position, i] + first * sin[position, i]
