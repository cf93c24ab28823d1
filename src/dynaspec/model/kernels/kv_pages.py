"""Pages of keys and values on CPU.

A page holds 16 keys with the keys as vector lanes, K [pages, kv heads, head_dim rounded up to 2, 16], and 16 values
with the head's dimensions as lanes, V [pages, kv heads, 16, head_dim rounded up to 16], as float32 or as bfloat16 in
uint16. Of bfloat16 each two dimensions of keys, or each two values, are words of two numbers side by side, see
``simd.place_of``. What is written is rounded once; all who read it see the same numbers, so bits do not depend on who
has written them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .simd import LANES, as_element, place_of

Floats = npt.NDArray[np.float32]
Kept = npt.NDArray[Any]
"""Of a cache: float32, or bfloat16 as uint16."""
Int64 = npt.NDArray[np.int64]

WRITE = "void(f4[:, :, :], f4[:, :, :], {0}[:, :, :, ::1], {0}[:, :, :, ::1], i8[::1])"


@njit(WRITE.format("f4"), cache=True, nogil=True, allocates=False)
def write_kv(k: Floats, v: Floats, k_cache: Kept, v_cache: Kept, slots: Int64) -> None:
    """Writes k and v [R, kv heads, head_dim] at ``slots`` [R]; rows with slot −1 are skipped."""
    rows, heads, head_dim = k.shape
    width = v_cache.shape[3]
    for row in range(rows):
        if slots[row] < 0:
            continue
        block, offset = slots[row] // LANES, slots[row] % LANES
        for head in range(heads):
            keys, values = k_cache[block, head].reshape(-1), v_cache[block, head].reshape(-1)
            for d in range(head_dim):
                keys[place_of(keys, d, offset, LANES)] = as_element(keys, k[row, head, d])
                values[place_of(values, offset, d, width)] = as_element(values, v[row, head, d])
            if head_dim % 2:
                keys[place_of(keys, head_dim, offset, LANES)] = 0


@njit(cache=True, nogil=True)
def move_kv(k_cache: Kept, v_cache: Kept, source: Int64, target: Int64) -> None:
    """Copies what is at the slots ``source`` [n] to ``target`` [n]; all is read before anything is written."""
    heads, head_dim, width = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    keys, values = (
        np.empty((source.size, heads, head_dim), k_cache.dtype),
        np.empty((source.size, heads, width), v_cache.dtype),
    )
    for i in range(source.size):
        block, offset = source[i] // LANES, source[i] % LANES
        for head in range(heads):
            kept_keys, kept_values = k_cache[block, head].reshape(-1), v_cache[block, head].reshape(-1)
            for d in range(head_dim):
                keys[i, head, d] = kept_keys[place_of(kept_keys, d, offset, LANES)]
            for d in range(width):
                values[i, head, d] = kept_values[place_of(kept_values, offset, d, width)]
    for i in range(source.size):
        block, offset = target[i] // LANES, target[i] % LANES
        for head in range(heads):
            kept_keys, kept_values = k_cache[block, head].reshape(-1), v_cache[block, head].reshape(-1)
            for d in range(head_dim):
                kept_keys[place_of(kept_keys, d, offset, LANES)] = keys[i, head, d]
            for d in range(width):
                kept_values[place_of(kept_values, offset, d, width)] = values[i, head, d]
