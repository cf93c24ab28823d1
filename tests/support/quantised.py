"""What quantising makes of a matrix, and products with it in NumPy, as ``kernels.quantised`` defines them."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind

from dynaspec.model.kernels import gemm, integer_blocks
from dynaspec.model.kernels.tiles import PANEL
from dynaspec.model.packed import PackedLinear

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

QUANTISERS = {"int8": integer_blocks.quantise_int8, "int4": integer_blocks.quantise_int4}
_KINDS = {"int8": Kind.Q8_0, "int4": Kind.Q4_1}
_GROUP = 32


def blocks_of(weight: torch.Tensor, form: str) -> torch.Tensor:
    """[out, groups, bytes] the matrix's blocks."""
    return torch.from_numpy(QUANTISERS[form](weight.numpy()))


def widened(blocks: torch.Tensor, form: str, depth: int) -> torch.Tensor:
    """[out, depth] the numbers that blocks stand for, by GGUF's own package."""
    found = gguf.quants.dequantize(blocks.numpy().reshape(len(blocks), -1), _KINDS[form])
    return torch.from_numpy(np.ascontiguousarray(found[:, :depth]))


def rounded(weight: torch.Tensor, form: str = "int8") -> torch.Tensor:
    """[out, in] the numbers that the matrix's quantised weights stand for, float32."""
    return widened(blocks_of(weight, form), form, weight.shape[1])


def fma(x: Floats, y: Floats, z: Floats) -> Floats:
    """x · y + z in float32, rounded once: the product is exact in float64, and the sum is rounded there to odd, which
    makes the second rounding the right one."""
    product, wide = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(total, towards), total).astype(np.float32)


def quantised_inputs(x: Floats) -> tuple[Integers, Floats]:
    """Integers [rows, groups, 32] and scales [rows, groups] of inputs [rows, in]."""
    rows, depth = x.shape
    whole = np.zeros((rows, -(-depth // _GROUP) * _GROUP), np.float32)
    whole[:, :depth] = x
    groups = whole.reshape(rows, -1, _GROUP)
    most = np.abs(groups).max(axis=2)
    with np.errstate(all="ignore"):
        near = np.rint(groups * (np.float32(127) / most)[:, :, None])
    return np.where(np.abs(near) <= 127, near, 0).astype(np.int64), most / np.float32(127)


def unpacked(layer: PackedLinear) -> Floats:
    """[out, in rounded up to 32] the numbers that a layer's panels stand for; [out, in] where they are float32."""
    panels = layer.packed
    if layer.form == gemm.FLOAT:
        numbers = panels.view(np.float32).reshape(len(panels), -1, PANEL).transpose(0, 2, 1)
    elif layer.form == gemm.BFLOAT:
        words = panels.reshape(len(panels), -1, PANEL // 2)
        numbers = np.concatenate([words << 16, words & 0xFFFF0000], axis=2).view(np.float32).transpose(0, 2, 1)
    else:
        ends = PANEL // 2 if layer.form == gemm.INT8 else PANEL
        halves = np.ascontiguousarray(panels[:, :, :ends]).view(np.float16).astype(np.float32)
        words = np.ascontiguousarray(panels[:, :, ends:]).reshape(*panels.shape[:2], -1, PANEL)
        found = words.view(np.uint8).reshape(*words.shape, 4)  # [panels, groups, words, 32, bytes of a word]
        scales = halves[:, :, :PANEL, None]
        if layer.form == gemm.INT8:
            inputs = found.transpose(0, 1, 3, 2, 4).reshape(*panels.shape[:2], PANEL, _GROUP)
            numbers = (inputs.astype(np.float32) - 128) * scales
        else:
            both = np.stack([found & 15, found >> 4], axis=3)  # of a word the first four inputs, then the others
            inputs = both.transpose(0, 1, 4, 2, 3, 5).reshape(*panels.shape[:2], PANEL, _GROUP)
            numbers = inputs.astype(np.float32) * scales + halves[:, :, PANEL:, None]
        numbers = numbers.transpose(0, 2, 1, 3)
    return numbers.reshape(len(panels) * PANEL, -1)[: layer.width]


class Rounding:
    """A matrix, in the place of a tensor [out, in], that is multiplied by rows whose inputs are rounded as the engine
    does it: ``rows @ matrix.T``."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.T = self

    def __rmatmul__(self, rows: torch.Tensor) -> torch.Tensor:
        integers, scales = quantised_inputs(rows.numpy())
        inputs = (integers * scales[:, :, None].astype(np.float64)).reshape(len(rows), -1)[:, : rows.shape[1]]
        return (torch.from_numpy(inputs) @ self._weight.double().T).float()


def product(x: Floats, blocks: torch.Tensor, form: str, bias: Floats) -> Floats:
    """x [rows, in] · weightᵀ + bias [out] → [rows, out]."""
    inputs, x_scales = quantised_inputs(x)
    stored = blocks.numpy()
    if form == "int8":
        scales = stored[:, :, :2].copy().view(np.float16).astype(np.float32)[:, :, 0]
        numbers = stored[:, :, 2:].view(np.int8).astype(np.int64)
    else:
        ends = stored[:, :, :4].copy().view(np.float16).astype(np.float32)
        scales, minimums = ends[:, :, 0], ends[:, :, 1]
        numbers = np.concatenate([stored[:, :, 4:] & 15, stored[:, :, 4:] >> 4], axis=2).astype(np.int64)
    out = np.repeat(bias[None], len(x), axis=0)
    for group in range(numbers.shape[1]):
        sums = (inputs[:, group] @ numbers[:, group].T).astype(np.float32) * scales[None, :, group]
        if form == "int4":
            totals = inputs[:, group].sum(axis=1).astype(np.float32)
            sums = fma(*np.broadcast_arrays(totals[:, None], minimums[None, :, group]), sums)
        out = fma(sums, np.broadcast_to(x_scales[:, group, None], out.shape), out)
    return out


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As near as logits are of which one model has its inputs rounded to int8, and the other one has not."""
    assert (found - expected).abs().max() < 0.1 * expected.std()
