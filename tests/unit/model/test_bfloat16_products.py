"""Products in bfloat16 arithmetic on every path that this processor has, bit for bit against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.model.kernels import amx, gemm
from dynaspec.model.kernels.simd import HAS_DOT
from dynaspec.model.packed import PackedLinear

SHAPES = [(96, 48), (307, 48), (40, 72), (512, 192), (256, 1408), (1, 3), (33, 31), (64, 33)]
PATHS = ["ROUNDED", *["DOT"] * HAS_DOT, *["TILES"] * amx.available()]
FORMS = ["float32", "bfloat16"]


def weight_of(form: str, shape: tuple[int, int]) -> torch.Tensor:
    weight = torch.randn(shape)
    return weight.bfloat16().float() if form == "bfloat16" else weight


def chain(x: np.ndarray, weight: np.ndarray, first: np.ndarray) -> np.ndarray:
    """[rows, out] ``first`` plus one product of bfloat16 after the other, every sum rounded to float32 once.

    A product has 16 bits, so float64 holds it exactly. The sum with a float32 may need more bits than float64 has: then
    it is rounded to odd there, which makes the second rounding the right one.
    """
    out = first
    for i in range(x.shape[1]):
        product = x[:, i, None].astype(np.float64) * weight[None, :, i].astype(np.float64)
        wide = out.astype(np.float64)
        total = product + wide
        part = total - product
        error = (product - (total - part)) + (wide - part)
        even = (total.view(np.int64) & 1) == 0
        towards = np.where(error > 0, np.inf, -np.inf)
        out = np.where((error != 0) & even, np.nextafter(total, towards), total).astype(np.float32)
    return out


def in_order(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return chain(x, weight, np.repeat(bias[None], len(x), axis=0))


def in_tiles(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """As Intel's TDPBF16PS sums: of 32 inputs, even and odd ones apart from 0 on, then both, then on to the rest."""
    out = np.repeat(bias[None], len(x), axis=0)
    none = np.zeros_like(out)
    for at in range(0, x.shape[1], 32):
        even, odd = (chain(x[:, at + i : at + 32 : 2], weight[:, at + i : at + 32 : 2], none) for i in range(2))
        out = out + (even + odd)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", PATHS)
def test_products_are_bit_for_bit_those_of_numpy(path: str, form: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias, x = weight_of(form, shape), torch.randn(shape[0]), torch.randn(17, shape[1])
    sums = in_tiles if path == "TILES" else in_order
    expected = sums(x.bfloat16().float().numpy(), weight.bfloat16().float().numpy(), bias.numpy())
    found = PackedLinear(weight, bias, 1, getattr(gemm, path))(x)
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", PATHS)
def test_rows_have_the_same_bits_for_every_number_of_rows_and_threads(
    path: str, form: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    weight, x = weight_of(form, shape), torch.randn(140, shape[1])
    layers = [PackedLinear(weight, None, threads, getattr(gemm, path)) for threads in (1, 2, 3)]
    together = layers[0](x)
    for layer in layers:
        for rows in (*range(1, 40), 64, 100, 130):
            assert torch.equal(layer(x[7 : 7 + rows].clone()), together[7 : 7 + rows]), f"{rows} rows"


@pytest.mark.skipif("DOT" not in PATHS, reason="the processor has no dot product of bfloat16")
@pytest.mark.parametrize("form", FORMS)
def test_the_dot_product_and_its_replacement_have_the_same_bits(form: str) -> None:
    weight, x = weight_of(form, (512, 192)), torch.randn(33, 192)
    found, expected = (PackedLinear(weight, None, 2, path)(x) for path in (gemm.DOT, gemm.ROUNDED))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("path", PATHS)
def test_infinite_and_undefined_values_stay_in_their_row(path: str) -> None:
    x = torch.randn(5, 48)
    x[1], x[3, 2] = float("nan"), float("inf")
    out = PackedLinear(torch.randn(32, 48), None, 1, getattr(gemm, path))(x)
    assert torch.isnan(out[1]).all()
    assert not torch.isfinite(out[3]).any()
    assert torch.isfinite(out[[0, 2, 4]]).all()


@pytest.mark.parametrize("path", PATHS)
def test_inputs_are_rounded_to_nearest_even(path: str) -> None:
    """1 + 2⁻⁸ is as near to 1 as to 1 + 2⁻⁷; 1 + 3 · 2⁻⁸ lies between 1 + 2⁻⁷ and 1 + 2⁻⁶."""
    x = torch.tensor([[1 + 2**-8, 0, 0], [1 + 3 * 2**-8, 0, 0], [-1 - 2**-8 - 2**-20, 0, 0]])
    out = PackedLinear(torch.ones(1, 3), None, 1, getattr(gemm, path))(x)
    assert out[:, 0].tolist() == [1, 1 + 2**-6, -1 - 2**-7]


def test_the_fastest_path_is_one_that_there_is() -> None:
    names = {getattr(gemm, path): path for path in PATHS}
    assert names[gemm.best_arithmetic()] == PATHS[-1]
