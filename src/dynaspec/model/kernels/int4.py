"""int4 weights: groups of 32 consecutive inputs of an output share a float16 scale and a float16 minimum.

A weight is a number of 0 … 15 times the scale, plus the minimum. A matrix [out, in] is first one of *blocks*, [out,
groups, 20] bytes, each block a scale, a minimum and 32 numbers, two a byte: the bytes of GGUF's Q4_1, so that a tensor
of that kind is blocks already, and one in Q4_0 nearly. ``pack`` then puts them in the order of a product.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit

from .quantised import INT4_WORDS, QUAD
from .simd import LANES
from .tiles import GROUP, PANEL, Floats, Words

Bytes = npt.NDArray[np.uint8]

BLOCK = 2 + 2 + GROUP // 2
"""Bytes of a block."""
_HALF = GROUP // 2
_LARGEST = 15
_MOST = float(np.finfo(np.float16).max)


@njit("void(u1[:, :, ::1], u4[:, :, ::1])", cache=True, nogil=True)
def _interleave(blocks: Bytes, panels: Words) -> None:
    for number in range(panels.shape[0]):
        first = number * PANEL
        for group in range(panels.shape[1]):
            for lane in range(min(PANEL, blocks.shape[0] - first)):
                block, panel = blocks[first + lane, group], panels[number, group]
                for which in range(2):
                    half = np.uint32(block[2 * which]) | np.uint32(block[2 * which + 1]) << np.uint32(8)
                    panel[which * LANES + lane // 2] |= half << np.uint32(lane % 2 * 16)
                for i in range(GROUP):
                    byte = np.uint32(block[4 + i % _HALF])
                    bits = byte >> np.uint32(i // _HALF * 4) & np.uint32(15)
                    at = PANEL + i // (2 * QUAD) * PANEL + lane
                    panel[at] |= bits << np.uint32(i % QUAD * 8 + i // QUAD % 2 * 4)


@njit("void(f4[:, ::1], f4[:, :, ::1])", cache=True, nogil=True)
def _ends(weight: Floats, found: Floats) -> None:
    """The smallest and the largest number of each group into ``found`` [out, groups, 2]."""
    rows, depth = weight.shape
    for row in range(rows):
        for group in range(found.shape[1]):
            smallest = largest = weight[row, group * GROUP]
            for i in range(group * GROUP + 1, min(group * GROUP + GROUP, depth)):
                smallest, largest = min(smallest, weight[row, i]), max(largest, weight[row, i])
            found[row, group, 0], found[row, group, 1] = smallest, largest


@njit("void(f4[:, ::1], f4[:, :, ::1], f4[:, ::1], u1[:, :, ::1])", cache=True, nogil=True)
def _round(weight: Floats, ends: Floats, inverse: Floats, blocks: Bytes) -> None:
    """Fills in the numbers of ``blocks`` [out, groups, 20]: how far above the minimum, times ``inverse`` [out, groups],
    to nearest."""
    rows, depth = weight.shape
    for row in range(rows):
        for group in range(inverse.shape[1]):
            start, smallest, by = group * GROUP, ends[row, group, 0], inverse[row, group]
            for i in range(min(GROUP, depth - start)):
                near = (weight[row, start + i] - smallest) * by + np.float32(0.5)
                number = min(np.uint8(near), np.uint8(_LARGEST))
                blocks[row, group, 4 + i % _HALF] |= number << np.uint8(i // _HALF * 4)


def quantise(weight: Floats) -> Bytes:
    """Blocks [out, groups, 20] of a weight [out, in]: each minimum is the smallest of its group, each scale how far the
    largest is above it / 15, each weight rounds to nearest. These are the numbers that GGUF's quantiser gives.

    Raises:
        ValueError: a weight is infinite or undefined, or larger than float16 goes.
    """
    weight = np.ascontiguousarray(weight)
    rows, groups = len(weight), -(-weight.shape[1] // GROUP)
    ends, blocks = np.empty((rows, groups, 2), np.float32), np.zeros((rows, groups, BLOCK), np.uint8)
    _ends(weight, ends)
    scales = (ends[:, :, 1] - ends[:, :, 0]) / np.float32(_LARGEST)
    with np.errstate(over="ignore"):
        stored = np.stack([scales, ends[:, :, 0]], axis=2).astype(np.float16)
    if not (np.isfinite(weight).all() and np.isfinite(stored).all()):
        raise ValueError(f"a weight is {np.abs(weight).max()}; expected {_MOST:g} at most")
    _round(weight, ends, np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0), blocks)
    blocks[:, :, :4] = stored.view(np.uint8)
    return blocks


def from_symmetric(blocks: Bytes) -> Bytes:
    """Blocks of the same weights from those of GGUF's Q4_0, [out, groups, 18] bytes, whose minimum is −8 scales.

    Raises:
        ValueError: a minimum is larger than float16 goes.
    """
    scales = blocks[:, :, :2].copy().view(np.float16)
    with np.errstate(over="ignore"):
        minimums = np.float16(-8) * scales
    if not np.isfinite(minimums).all():
        raise ValueError(f"a scale is {np.abs(scales).max()}; expected {_MOST / 8:g} at most")
    return np.concatenate([blocks[:, :, :2], minimums.view(np.uint8), blocks[:, :, 2:]], axis=2)


def pack(blocks: Bytes) -> Words:
    """Panels for ``gemm.multiply``.

    Args:
        blocks: [out, groups, 20].

    Returns:
        [panels, groups, ``quantised.INT4_WORDS``], as uint32.
    """
    packed = np.zeros((-(-len(blocks) // PANEL), blocks.shape[1], INT4_WORDS), np.uint32)
    _interleave(np.ascontiguousarray(blocks), packed)
    return packed
