"""int4 weights: what they are quantised to, and products with them against NumPy."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from dynaspec.model.kernels import gemm, int4
from dynaspec.model.packed import PackedLinear
from support.quantised import blocks_of, rounded

from .test_int8 import SHAPES, fma

GROUP = 32


def parts(blocks: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers [out, groups, 32], scales and minimums [out, groups], float32."""
    ends = blocks.numpy()[:, :, :4].copy().view(np.float16).astype(np.float32)
    packed = blocks.numpy()[:, :, 4:]
    numbers = np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.float32)
    return numbers, ends[:, :, 0], ends[:, :, 1]


def halved(x: np.ndarray) -> np.ndarray:
    """[rows] the sum of 32 columns, where the second half of what is left is added to the first one."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def reference(x: np.ndarray, blocks: torch.Tensor, bias: np.ndarray) -> np.ndarray:
    """x · weightᵀ + bias as the kernel sums: of a group first Σ x · number, in order, then times its scale, then Σ x
    times its minimum."""
    numbers, scales, minimums = parts(blocks)
    out = np.repeat(bias[None], len(x), axis=0)
    whole = np.zeros((len(x), numbers.shape[1] * GROUP), np.float32)
    whole[:, : x.shape[1]] = x
    for group in range(numbers.shape[1]):
        inputs = whole[:, group * GROUP : (group + 1) * GROUP]
        sums = np.zeros_like(out)
        for i in range(GROUP):
            sums = fma(np.broadcast_to(inputs[:, i, None], out.shape), numbers[None, :, group, i], sums)
        out = fma(sums, np.broadcast_to(scales[None, :, group], out.shape), out)
        out = fma(np.broadcast_to(halved(inputs)[:, None], out.shape), minimums[None, :, group], out)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_products_are_bit_for_bit_those_of_numpy(shape: tuple[int, int], threads: int) -> None:
    torch.manual_seed(0)
    blocks, bias = blocks_of(torch.randn(shape), "int4"), torch.randn(shape[0])
    layer, x = PackedLinear(blocks, bias, threads), torch.randn(17, shape[1])
    assert layer.form == gemm.INT4
    expected = reference(x.numpy(), blocks, bias.numpy())
    for rows in range(1, 18):
        np.testing.assert_array_equal(layer(x[:rows]).numpy(), expected[:rows], f"{rows} rows")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_have_the_same_bits_for_every_number_of_rows_and_threads(shape: tuple[int, int], threads: int) -> None:
    torch.manual_seed(0)
    blocks = blocks_of(torch.randn(shape), "int4")
    layer, x = PackedLinear(blocks, None, threads), torch.randn(300, shape[1])
    together = PackedLinear(blocks, None, 1)(x)
    for rows in (*range(1, 34), 100, 255):
        assert torch.equal(layer(x[7 : 7 + rows].clone()), together[7 : 7 + rows]), f"{rows} rows"


@pytest.mark.parametrize("scale", [1e-6, 3e-4, 1.0, 1e3])
def test_blocks_are_those_of_gguf_s_quantiser(scale: float) -> None:
    torch.manual_seed(1)
    weight = torch.randn(70, 96) * scale
    weight[3, :32] = 0
    weight[4, :32] = torch.arange(32) * 0.5 * scale  # halves of steps
    weight[4, 0] = 15 * scale
    expected = gguf.quants.quantize(weight.numpy(), Kind.Q4_1)
    np.testing.assert_array_equal(int4.quantise(weight.numpy()).reshape(70, -1), expected)


def test_quantised_weights_are_near() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 80)  # the last group is half empty, which makes no difference to its ends
    steps = torch.stack([(part.amax(1) - part.amin(1)) / 15 for part in weight.split(32, dim=1)], dim=1)
    assert ((rounded(weight, "int4") - weight).abs() <= 0.52 * steps.repeat_interleave(32, 1)[:, :80]).all()


def test_blocks_of_q4_0_keep_their_numbers() -> None:
    torch.manual_seed(0)
    raw = gguf.quants.quantize(torch.randn(40, 96).numpy(), Kind.Q4_0)
    blocks = int4.from_symmetric(raw.reshape(40, -1, 18))
    expected = gguf.quants.dequantize(raw, Kind.Q4_0)
    np.testing.assert_array_equal(gguf.quants.dequantize(blocks.reshape(40, -1), Kind.Q4_1), expected)


def test_a_scale_whose_minimum_no_float16_holds() -> None:
    blocks = np.zeros((1, 1, 18), np.uint8)
    blocks[0, 0, :2] = np.float16(9000).reshape(1).view(np.uint8)
    with pytest.raises(ValueError, match=r"a scale is 9000\.0; expected 8188 at most"):
        int4.from_symmetric(blocks)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e7])
def test_weights_that_no_scale_holds(odd: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 40] = odd
    with pytest.raises(ValueError, match=r"a weight is (nan|inf|1e\+07|10000000.0); expected 65504 at most"):
        int4.quantise(weight.numpy())


def test_memory() -> None:
    layer = PackedLinear(blocks_of(torch.randn(64, 96), "int4"), None, 1)
    assert layer.packed.nbytes == 64 * 96 * 20 // 32
    assert layer.packed.shape == (2, 3, gemm.INT4_WORDS)


def test_infinite_and_undefined_values_stay_in_their_row() -> None:
    x = torch.randn(3, 48)
    x[1] = float("nan")
    out = PackedLinear(blocks_of(torch.randn(32, 48), "int4"), None, 1)(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
