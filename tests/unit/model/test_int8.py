"""int8 weights: what they are quantised to, and products with them against NumPy and against the widened matrix."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from dynaspec.model.kernels import gemm, int8
from dynaspec.model.packed import PackedLinear

SHAPES = [(96, 64), (307, 48), (40, 72), (1, 3), (33, 32), (64, 33), (31, 1), (256, 1408), (512, 192)]


def blocks_of(weight: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(int8.quantise(weight.numpy()))


def widened(blocks: torch.Tensor, depth: int) -> torch.Tensor:
    """[out, depth] the numbers that blocks stand for, by GGUF's own package."""
    found = gguf.quants.dequantize(blocks.numpy().reshape(len(blocks), -1), Kind.Q8_0)
    return torch.from_numpy(np.ascontiguousarray(found[:, :depth]))


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x · y + z in float32, rounded once: the product is exact in float64, and the sum is rounded there to odd, which
    makes the second rounding the right one."""
    product, wide = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(total, towards), total).astype(np.float32)


def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """x · weightᵀ + bias as the kernel sums: one input after the other, from the bias on."""
    out = np.repeat(bias[None], len(x), axis=0)
    for i in range(x.shape[1]):
        out = fma(np.broadcast_to(x[:, i, None], out.shape), np.broadcast_to(weight[None, :, i], out.shape), out)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_products_are_bit_for_bit_those_of_numpy(shape: tuple[int, int], threads: int) -> None:
    torch.manual_seed(0)
    blocks, bias = blocks_of(torch.randn(shape)), torch.randn(shape[0])
    layer, x = PackedLinear(blocks, bias, threads), torch.randn(17, shape[1])
    expected = reference(x.numpy(), widened(blocks, shape[1]).numpy(), bias.numpy())
    for rows in range(1, 18):
        np.testing.assert_array_equal(layer(x[:rows]).numpy(), expected[:rows], f"{rows} rows")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_have_the_bits_of_the_widened_matrix_for_every_number_of_rows_and_threads(
    shape: tuple[int, int], threads: int
) -> None:
    torch.manual_seed(0)
    blocks = blocks_of(torch.randn(shape))
    layer, x = PackedLinear(blocks, None, threads), torch.randn(300, shape[1])
    together = PackedLinear(widened(blocks, shape[1]), None, 1)(x)
    for rows in (*range(1, 34), 100, 255):
        assert torch.equal(layer(x[7 : 7 + rows].clone()), together[7 : 7 + rows]), f"{rows} rows"


@pytest.mark.parametrize("scale", [1e-6, 3e-4, 1.0, 1e4])
def test_blocks_are_those_of_gguf_s_quantiser(scale: float) -> None:
    torch.manual_seed(1)
    weight = torch.randn(70, 96) * scale
    weight[3, :32] = 0
    weight[4, :32] = torch.arange(32) * 0.5 * scale  # halves of steps
    weight[4, 0] = 127 * scale
    expected = gguf.quants.quantize(weight.numpy(), Kind.Q8_0)
    np.testing.assert_array_equal(int8.quantise(weight.numpy()).reshape(70, -1), expected)


def test_quantised_weights_are_near_and_blocks_quantise_to_themselves() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 80)
    blocks = blocks_of(weight)
    found = widened(blocks, 80)
    steps = torch.stack([part.abs().amax(1) / 127 for part in weight.split(32, dim=1)], dim=1)
    assert ((found - weight).abs() <= 0.57 * steps.repeat_interleave(32, 1)[:, :80]).all()
    assert torch.equal(blocks_of(found), blocks)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e7])
def test_weights_that_no_scale_holds(odd: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 40] = odd
    with pytest.raises(ValueError, match=r"a weight is (nan|inf|1e\+07|10000000.0); expected 8\.3.* at most"):
        int8.quantise(weight.numpy())


def test_memory() -> None:
    weight = torch.randn(64, 96)
    layer = PackedLinear(blocks_of(weight), None, 1)
    assert layer.packed.nbytes == 64 * 96 * 34 // 32
    assert layer.packed.shape == (2, 3, gemm.GROUP_WORDS)


def test_infinite_and_undefined_values_stay_in_their_row() -> None:
    x = torch.randn(3, 48)  # the last group is half empty
    x[1] = float("nan")
    out = PackedLinear(blocks_of(torch.randn(32, 48)), None, 1)(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
