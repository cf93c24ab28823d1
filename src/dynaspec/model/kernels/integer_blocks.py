"""Blocks of int8 and int4 weights: groups of 32 consecutive inputs of an output, which share a scale.

A matrix [out, in] is first one of *blocks*, in the bytes of GGUF's kinds, so that a tensor of such a kind is blocks
already. ``pack_int8`` and ``pack_int4`` then put them in the order of a product.

* int8, GGUF's Q8_0: [out, groups, 34] bytes, each block a float16 scale and 32 weights.
* int4, GGUF's Q4_1: [out, groups, 20] bytes, each block a float16 scale, a float16 minimum and 32 numbers, two a byte.
  A weight is a number of 0 … 15 times the scale, plus the minimum. Blocks of Q4_0 are nearly that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .quantised import INT4_WORDS, INT8_WORDS, OFFSET, QUAD
from .tiles import GROUP, PANEL, Floats, Words

Bytes = npt.NDArray[np.uint8]

INT8_BLOCK, INT4_BLOCK = 2 + GROUP, 2 + 2 + GROUP // 2
"""Bytes of a block."""
_HALF = GROUP // 2
_INT8_LARGEST, _INT4_LARGEST = np.float32(127), 15
_INT4_MOST = float(np.finfo(np.float16).max)
_INT8_MOST = float(_INT8_LARGEST) * _INT4_MOST
_ROUNDED_AT_ONCE = 1 << 17
"""Weights that are quantised at a time: few enough that what is computed of them stays in the cache."""


def quantise_int8(weight: Floats) -> Bytes:
    """Blocks [out, groups, 34] of a weight [out, in]: each scale is the largest of its group / 127, each weight rounds
    to nearest, halves away from zero. These are the numbers that GGUF's quantiser gives.

    Raises:
        ValueError: a weight is infinite or undefined, or larger than float16 scales go.
    """
    blocks = np.empty((len(weight), -(-weight.shape[1] // GROUP), INT8_BLOCK), np.int8)
    for rows, groups in _in_groups(weight):
        scales = np.abs(groups).max(axis=2) / _INT8_LARGEST  # undefined where a weight is
        with np.errstate(over="ignore"):
            stored = scales.astype(np.float16)
        if not np.isfinite(stored).all():
            raise ValueError(f"a weight is {np.abs(weight).max()}; expected {_INT8_MOST:g} at most")
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        exact = groups * inverse[:, :, None]
        sizes = np.abs(exact)
        near = np.floor(sizes)
        near += sizes - near >= np.float32(0.5)
        blocks[rows, :, 2:] = np.copysign(near, exact)
        blocks[rows, :, :2] = stored[:, :, None].view(np.int8)
    return blocks.view(np.uint8)


def pack_int8(blocks: Bytes) -> Words:
    """Panels for ``gemm.multiply``.

    Args:
        blocks: [out, groups, 34].

    Returns:
        [panels, groups, ``quantised.INT8_WORDS``], as uint32.
    """
    packed = np.empty((-(-len(blocks) // PANEL), blocks.shape[1], INT8_WORDS), np.uint32)
    packed[:, :, : PANEL // 2] = _by_panel(blocks[:, :, :2].copy().view(np.uint16)).view(np.uint32)[:, :, 0]
    packed[:, :, PANEL // 2 :] = _by_panel((blocks[:, :, 2:] ^ np.uint8(OFFSET)).view(np.uint32)).reshape(
        *packed.shape[:2], -1
    )
    return packed


def quantise_int4(weight: Floats) -> Bytes:
    """Blocks [out, groups, 20] of a weight [out, in]: each minimum is the smallest of its group, each scale how far the
    largest is above it / 15, each weight rounds to nearest. These are the numbers that GGUF's quantiser gives.

    Raises:
        ValueError: a weight is infinite or undefined, or larger than float16 goes.
    """
    blocks = np.empty((len(weight), -(-weight.shape[1] // GROUP), INT4_BLOCK), np.uint8)
    for rows, groups in _in_groups(weight, repeat_last=True):
        smallest = groups.min(axis=2)
        with np.errstate(over="ignore", invalid="ignore"):
            scales = (groups.max(axis=2) - smallest) / np.float32(_INT4_LARGEST)
            stored = np.stack([scales, smallest], axis=2).astype(np.float16)
        if not np.isfinite(stored).all():
            raise ValueError(f"a weight is {np.abs(weight).max()}; expected {_INT4_MOST:g} at most")
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        near = (groups - smallest[:, :, None]) * inverse[:, :, None] + np.float32(0.5)
        numbers = np.minimum(near.astype(np.uint8), np.uint8(_INT4_LARGEST))
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
        raise ValueError(f"a scale is {np.abs(scales).max()}; expected {_INT4_MOST / 8:g} at most")
    return np.concatenate([blocks[:, :, :2], minimums.view(np.uint8), blocks[:, :, 2:]], axis=2)


def pack_int4(blocks: Bytes) -> Words:
    """Panels for ``gemm.multiply``.

    Args:
        blocks: [out, groups, 20].

    Returns:
        [panels, groups, ``quantised.INT4_WORDS``], as uint32.
    """
    packed = np.empty((-(-len(blocks) // PANEL), blocks.shape[1], INT4_WORDS), np.uint32)
    ends = _by_panel(blocks[:, :, :4].copy().view(np.uint16))  # all scales, then all minimums
    packed[:, :, :PANEL] = ends.view(np.uint32).reshape(*packed.shape[:2], -1)
    numbers = np.concatenate([blocks[:, :, 4:] & np.uint8(15), blocks[:, :, 4:] >> np.uint8(4)], axis=2)
    low, high = np.moveaxis(numbers.reshape(*blocks.shape[:2], -1, 2, QUAD), 3, 0)
    words = (low | high << np.uint8(4)).view(np.uint32)[..., 0]
    packed[:, :, PANEL:] = _by_panel(words).reshape(*packed.shape[:2], -1)
    return packed


def _in_groups(weight: Floats, repeat_last: bool = False) -> Iterator[tuple[slice, Floats]]:
    """A weight [out, in] some rows at a time: which they are, and they themselves as [rows, groups, 32].

    A group that is not full ends in zeros, or in its first number where the ends of groups count (``repeat_last``).
    """
    rows, depth = weight.shape
    groups = -(-depth // GROUP)
    at_once = max(1, _ROUNDED_AT_ONCE // (groups * GROUP))
    for first in range(0, rows, at_once):
        some = slice(first, min(first + at_once, rows))
        whole = np.zeros((some.stop - first, groups * GROUP), np.float32)
        whole[:, :depth] = weight[some]
        if repeat_last:
            whole[:, depth:] = whole[:, -GROUP, None]
        yield some, whole.reshape(len(whole), groups, GROUP)


def _by_panel(words: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[out, groups, n] → [panels, groups, n, 32]: a panel's outputs side by side, with zeros where there are none."""
    panels = -(-len(words) // PANEL)
    if len(words) < panels * PANEL:
        padding = np.zeros((panels * PANEL - len(words), *words.shape[1:]), words.dtype)
        words = np.concatenate([words, padding])
    return np.ascontiguousarray(words.reshape(panels, PANEL, *words.shape[1:]).transpose(0, 2, 3, 1))
