"""int8 weights: groups of 32 consecutive inputs of an output share a float16 scale.

A matrix [out, in] is first one of *blocks*, [out, groups, 34] bytes, each block a scale and 32 weights: the bytes of
GGUF's Q8_0, so that a tensor of that kind is blocks already. ``pack`` then puts them in the order of a product.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .quantised import INT8_WORDS, OFFSET, QUAD
from .tiles import GROUP, PANEL, Floats, Words

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int8]

BLOCK = 2 + GROUP
"""Bytes of a block."""
_LARGEST = 127
_MOST = _LARGEST * float(np.finfo(np.float16).max)


@njit("void(u4[:, ::1], u4[:, ::1])", cache=True, nogil=True)
def _largest(weight: Words, found: Words) -> None:
    """The largest magnitude of each group into ``found`` [out, groups]; all as bits, which have the order of the
    numbers, with what is undefined behind them."""
    rows, depth = weight.shape
    for row in range(rows):
        for group in range(found.shape[1]):
            largest = np.uint32(0)
            for i in range(group * GROUP, min(group * GROUP + GROUP, depth)):
                largest = max(largest, weight[row, i] & np.uint32(0x7FFFFFFF))
            found[row, group] = largest


@njit("void(f4[:, ::1], f4[:, ::1], i1[:, :, ::1])", cache=True, nogil=True)
def _round(weight: Floats, inverse: Floats, blocks: Numbers) -> None:
    """Fills in the weights of ``blocks`` [out, groups, 34]: times ``inverse`` [out, groups], to nearest."""
    rows, depth = weight.shape
    for row in range(rows):
        for group in range(inverse.shape[1]):
            start = group * GROUP
            by = inverse[row, group]
            for i in range(min(GROUP, depth - start)):
                value = weight[row, start + i] * by
                size = abs(value)
                below = np.floor(size)
                near = below + np.float32(1) if size - below >= np.float32(0.5) else below
                blocks[row, group, 2 + i] = np.int8(-near if value < 0 else near)


def quantise(weight: Floats) -> Bytes:
    """Blocks [out, groups, 34] of a weight [out, in]: each scale is the largest of its group / 127, each weight rounds
    to nearest, halves away from zero. These are the numbers that GGUF's quantiser gives.

    Raises:
        ValueError: a weight is infinite or undefined, or larger than float16 scales go.
    """
    weight = np.ascontiguousarray(weight)
    rows, groups = len(weight), -(-weight.shape[1] // GROUP)
    largest, blocks = np.empty((rows, groups), np.uint32), np.zeros((rows, groups, BLOCK), np.int8)
    _largest(weight.view(np.uint32), largest)
    scales = largest.view(np.float32) / np.float32(_LARGEST)
    with np.errstate(over="ignore"):
        stored = scales.astype(np.float16)
    if not np.isfinite(stored).all():
        raise ValueError(f"a weight is {np.abs(weight).max()}; expected {_MOST:g} at most")
    _round(weight, np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0), blocks)
    blocks[:, :, :2] = stored[:, :, None].view(np.int8)
    return blocks.view(np.uint8)


@njit("void(u1[:, :, ::1], u1[:, :, ::1])", cache=True, nogil=True)
def _interleave(blocks: Bytes, panels: Bytes) -> None:
    for number in range(panels.shape[0]):
        first = number * PANEL
        for group in range(panels.shape[1]):
            for lane in range(min(PANEL, blocks.shape[0] - first)):
                panels[number, group, 2 * lane] = blocks[first + lane, group, 0]
                panels[number, group, 2 * lane + 1] = blocks[first + lane, group, 1]
                for i in range(GROUP):
                    at = 2 * PANEL + (i // QUAD * PANEL + lane) * QUAD + i % QUAD
                    panels[number, group, at] = blocks[first + lane, group, 2 + i] ^ np.uint8(OFFSET)


def pack(blocks: Bytes) -> Words:
    """Panels for ``gemm.multiply``.

    Args:
        blocks: [out, groups, 34].

    Returns:
        [panels, groups, ``quantised.INT8_WORDS``], as uint32.
    """
    packed = np.zeros((-(-len(blocks) // PANEL), blocks.shape[1], INT8_WORDS), np.uint32)
    _interleave(np.ascontiguousarray(blocks), packed.view(np.uint8))
    return packed
