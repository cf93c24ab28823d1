"""int8 weights: groups of 32 consecutive inputs of an output share a float16 scale.

A matrix [out, in] is first one of *blocks*, [out, groups, 34] bytes, each block a scale and 32 weights: the bytes of
GGUF's Q8_0, so that a tensor of that kind is blocks already. ``pack`` then puts them in the order of a product.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .quantised import INT8_WORDS, OFFSET, by_panel, in_groups
from .tiles import GROUP, PANEL, Floats, Words

Bytes = npt.NDArray[np.uint8]

BLOCK = 2 + GROUP
"""Bytes of a block."""
_LARGEST = np.float32(127)
_MOST = float(_LARGEST) * float(np.finfo(np.float16).max)


def quantise(weight: Floats) -> Bytes:
    """Blocks [out, groups, 34] of a weight [out, in]: each scale is the largest of its group / 127, each weight rounds
    to nearest, halves away from zero. These are the numbers that GGUF's quantiser gives.

    Raises:
        ValueError: a weight is infinite or undefined, or larger than float16 scales go.
    """
    blocks = np.empty((len(weight), -(-weight.shape[1] // GROUP), BLOCK), np.int8)
    for rows, groups in in_groups(weight):
        scales = np.abs(groups).max(axis=2) / _LARGEST  # undefined where a weight is
        with np.errstate(over="ignore"):
            stored = scales.astype(np.float16)
        if not np.isfinite(stored).all():
            raise ValueError(f"a weight is {np.abs(weight).max()}; expected {_MOST:g} at most")
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        exact = groups * inverse[:, :, None]
        sizes = np.abs(exact)
        near = np.floor(sizes)
        near += sizes - near >= np.float32(0.5)
        blocks[rows, :, 2:] = np.copysign(near, exact)
        blocks[rows, :, :2] = stored[:, :, None].view(np.int8)
    return blocks.view(np.uint8)


def pack(blocks: Bytes) -> Words:
    """Panels for ``gemm.multiply``.

    Args:
        blocks: [out, groups, 34].

    Returns:
        [panels, groups, ``quantised.INT8_WORDS``], as uint32.
    """
    packed = np.empty((-(-len(blocks) // PANEL), blocks.shape[1], INT8_WORDS), np.uint32)
    packed[:, :, : PANEL // 2] = by_panel(blocks[:, :, :2].copy().view(np.uint16)).view(np.uint32)[:, :, 0]
    packed[:, :, PANEL // 2 :] = by_panel((blocks[:, :, 2:] ^ np.uint8(OFFSET)).view(np.uint32)).reshape(
        *packed.shape[:2], -1
    )
    return packed
