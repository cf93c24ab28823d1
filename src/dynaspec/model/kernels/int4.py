"""int4 weights: groups of 32 consecutive inputs of an output share a float16 scale and a float16 minimum.

A weight is a number of 0 … 15 times the scale, plus the minimum. A matrix [out, in] is first one of *blocks*, [out,
groups, 20] bytes, each block a scale, a minimum and 32 numbers, two a byte: the bytes of GGUF's Q4_1, so that a tensor
of that kind is blocks already, and one in Q4_0 nearly. ``pack`` then puts them in the order of a product.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .quantised import INT4_WORDS, QUAD, by_panel, in_groups
from .tiles import GROUP, PANEL, Floats, Words

Bytes = npt.NDArray[np.uint8]

BLOCK = 2 + 2 + GROUP // 2
"""Bytes of a block."""
_HALF = GROUP // 2
_LARGEST = 15
_MOST = float(np.finfo(np.float16).max)


def quantise(weight: Floats) -> Bytes:
    """Blocks [out, groups, 20] of a weight [out, in]: each minimum is the smallest of its group, each scale how far the
    largest is above it / 15, each weight rounds to nearest. These are the numbers that GGUF's quantiser gives.

    Raises:
        ValueError: a weight is infinite or undefined, or larger than float16 goes.
    """
    blocks = np.empty((len(weight), -(-weight.shape[1] // GROUP), BLOCK), np.uint8)
    for rows, groups in in_groups(weight, repeat_last=True):
        smallest = groups.min(axis=2)
        with np.errstate(over="ignore", invalid="ignore"):
            scales = (groups.max(axis=2) - smallest) / np.float32(_LARGEST)
            stored = np.stack([scales, smallest], axis=2).astype(np.float16)
        if not np.isfinite(stored).all():
            raise ValueError(f"a weight is {np.abs(weight).max()}; expected {_MOST:g} at most")
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        near = (groups - smallest[:, :, None]) * inverse[:, :, None] + np.float32(0.5)
        numbers = np.minimum(near.astype(np.uint8), np.uint8(_LARGEST))
        blocks[rows, :, 4:] = numbers[:, :, :_HALF] | numbers[:, :, _HALF:] << np.uint8(4)
        blocks[rows, :, :4] = stored.view(np.uint8)
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
    packed = np.empty((-(-len(blocks) // PANEL), blocks.shape[1], INT4_WORDS), np.uint32)
    ends = by_panel(blocks[:, :, :4].copy().view(np.uint16))  # all scales, then all minimums
    packed[:, :, :PANEL] = ends.view(np.uint32).reshape(*packed.shape[:2], -1)
    numbers = np.concatenate([blocks[:, :, 4:] & np.uint8(15), blocks[:, :, 4:] >> np.uint8(4)], axis=2)
    low, high = np.moveaxis(numbers.reshape(*blocks.shape[:2], -1, 2, QUAD), 3, 0)
    words = (low | high << np.uint8(4)).view(np.uint32)[..., 0]
    packed[:, :, PANEL:] = by_panel(words).reshape(*packed.shape[:2], -1)
    return packed
