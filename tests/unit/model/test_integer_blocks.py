"""int8 and int4 weights: what they are quantised to."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from dynaspec.model.kernels import quantised
from dynaspec.model.kernels.integer_blocks import from_symmetric, quantise_int4, quantise_int8
from dynaspec.model.packed import PackedLinear
from support.quantised import blocks_of, rounded, widened


@pytest.mark.parametrize("scale", [1e-6, 3e-4, 1.0, 1e4])
def test_int8_blocks_are_those_of_gguf_s_quantiser(scale: float) -> None:
    torch.manual_seed(1)
    weight = torch.randn(70, 96) * scale
    weight[3, :32] = 0
    weight[4, :32] = torch.arange(32) * 0.5 * scale  # halves of steps
    weight[4, 0] = 127 * scale
    expected = gguf.quants.quantize(weight.numpy(), Kind.Q8_0)
    np.testing.assert_array_equal(quantise_int8(weight.numpy()).reshape(70, -1), expected)


def test_int8_weights_are_near_and_blocks_quantise_to_themselves() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 80)
    blocks = blocks_of(weight, "int8")
    found = widened(blocks, "int8", 80)
    steps = torch.stack([part.abs().amax(1) / 127 for part in weight.split(32, dim=1)], dim=1)
    assert ((found - weight).abs() <= 0.57 * steps.repeat_interleave(32, 1)[:, :80]).all()
    assert torch.equal(blocks_of(found, "int8"), blocks)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e7])
def test_weights_that_no_int8_scale_holds(odd: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 40] = odd
    with pytest.raises(ValueError, match=r"a weight is (nan|inf|1e\+07|10000000.0); expected 8\.3.* at most"):
        quantise_int8(weight.numpy())


def test_memory_of_int8() -> None:
    weight = torch.randn(64, 96)
    layer = PackedLinear(blocks_of(weight, "int8"), None, 1)
    assert layer.packed.nbytes == 64 * 96 * 34 // 32
    assert layer.packed.shape == (2, 3, quantised.INT8_WORDS)


@pytest.mark.parametrize("scale", [1e-6, 3e-4, 1.0, 1e3])
def test_int4_blocks_are_those_of_gguf_s_quantiser(scale: float) -> None:
    torch.manual_seed(1)
    weight = torch.randn(70, 96) * scale
    weight[3, :32] = 0
    weight[4, :32] = torch.arange(32) * 0.5 * scale  # halves of steps
    weight[4, 0] = 15 * scale
    expected = gguf.quants.quantize(weight.numpy(), Kind.Q4_1)
    np.testing.assert_array_equal(quantise_int4(weight.numpy()).reshape(70, -1), expected)


def test_int4_weights_are_near() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 80)  # the last group is half empty, which makes no difference to its ends
    steps = torch.stack([(part.amax(1) - part.amin(1)) / 15 for part in weight.split(32, dim=1)], dim=1)
    assert ((rounded(weight, "int4") - weight).abs() <= 0.52 * steps.repeat_interleave(32, 1)[:, :80]).all()


def test_blocks_of_q4_0_keep_their_numbers() -> None:
    torch.manual_seed(0)
    raw = gguf.quants.quantize(torch.randn(40, 96).numpy(), Kind.Q4_0)
    blocks = from_symmetric(raw.reshape(40, -1, 18))
    expected = gguf.quants.dequantize(raw, Kind.Q4_0)
    np.testing.assert_array_equal(gguf.quants.dequantize(blocks.reshape(40, -1), Kind.Q4_1), expected)


def test_a_scale_whose_minimum_no_float16_holds() -> None:
    blocks = np.zeros((1, 1, 18), np.uint8)
    blocks[0, 0, :2] = np.float16(9000).reshape(1).view(np.uint8)
    with pytest.raises(ValueError, match=r"a scale is 9000\.0; expected 8188 at most"):
        from_symmetric(blocks)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e7])
def test_weights_that_no_int4_scale_holds(odd: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 40] = odd
    with pytest.raises(ValueError, match=r"a weight is (nan|inf|1e\+07|10000000.0); expected 65504 at most"):
        quantise_int4(weight.numpy())


def test_memory_of_int4() -> None:
    layer = PackedLinear(blocks_of(torch.randn(64, 96), "int4"), None, 1)
    assert layer.packed.nbytes == 64 * 96 * 20 // 32
    assert layer.packed.shape == (2, 3, quantised.INT4_WORDS)
