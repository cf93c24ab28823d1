"""int8 weights: what they are quantised to."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from dynaspec.model.kernels import int8, quantised
from dynaspec.model.packed import PackedLinear
from support.quantised import blocks_of, widened


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
    blocks = blocks_of(weight, "int8")
    found = widened(blocks, "int8", 80)
    steps = torch.stack([part.abs().amax(1) / 127 for part in weight.split(32, dim=1)], dim=1)
    assert ((found - weight).abs() <= 0.57 * steps.repeat_interleave(32, 1)[:, :80]).all()
    assert torch.equal(blocks_of(found, "int8"), blocks)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e7])
def test_weights_that_no_scale_holds(odd: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 40] = odd
    with pytest.raises(ValueError, match=r"a weight is (nan|inf|1e\+07|10000000.0); expected 8\.3.* at most"):
        int8.quantise(weight.numpy())


def test_memory() -> None:
    weight = torch.randn(64, 96)
    layer = PackedLinear(blocks_of(weight, "int8"), None, 1)
    assert layer.packed.nbytes == 64 * 96 * 34 // 32
    assert layer.packed.shape == (2, 3, quantised.INT8_WORDS)
