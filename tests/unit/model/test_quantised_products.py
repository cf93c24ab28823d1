"""Products with int8 and int4 weights: bit for bit those of NumPy, on every path and for every number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.compiled import njit
from dynaspec.model.kernels import gemm, quantised
from dynaspec.model.kernels.tiles import GROUP, Halves, panel_kernel
from dynaspec.model.packed import PackedLinear
from support.panels import NARROW, WIDE, product_by
from support.quantised import blocks_of, product, widened

SHAPES = [(96, 64), (307, 48), (40, 72), (1, 3), (33, 32), (64, 33), (31, 1), (256, 1408), (512, 192)]
FORMS = {"int8": gemm.INT8, "int4": gemm.INT4}
VNNI, BYTES = quantised._VNNI, quantised._BYTE_PRODUCTS
PATHS = {
    "VNNI": (VNNI, BYTES),
    "VNNI in half the width": (min(VNNI, 32), BYTES),
    "products of bytes": (0, BYTES),
    "those in half the width": (0, min(BYTES, 32)),
    "neither": (0, 0),
}
"""Bytes of the registers that VNNI and that products of bytes work on; what the processor has not is 0."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_products_are_bit_for_bit_those_of_numpy(form: str, shape: tuple[int, int], threads: int) -> None:
    torch.manual_seed(0)
    blocks, bias = blocks_of(torch.randn(shape), form), torch.randn(shape[0])
    layer, x = PackedLinear(blocks, bias, threads), torch.randn(17, shape[1])
    assert layer.form == FORMS[form]
    expected = product(x.numpy(), blocks, form, bias.numpy())
    for rows in range(1, 18):
        np.testing.assert_array_equal(layer(x[:rows]).numpy(), expected[:rows], f"{rows} rows")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_rows_have_the_same_bits_for_every_number_of_rows_and_threads(
    form: str, shape: tuple[int, int], threads: int
) -> None:
    torch.manual_seed(0)
    blocks = blocks_of(torch.randn(shape), form)
    layer, x = PackedLinear(blocks, None, threads), torch.randn(300, shape[1])
    together = PackedLinear(blocks, None, 1)(x)
    for rows in (*range(1, 34), 100, 255):
        assert torch.equal(layer(x[7 : 7 + rows].clone()), together[7 : 7 + rows]), f"{rows} rows"


@pytest.mark.parametrize("form", FORMS)
def test_rounding_inputs_changes_little(form: str) -> None:
    """Two in a hundred of what outputs vary by: an input of a group is off by 1/254 of the largest at most."""
    torch.manual_seed(0)
    blocks, x = blocks_of(torch.randn(256, 1408), form), torch.randn(40, 1408)
    expected = x.double() @ widened(blocks, form, 1408).double().T
    found = PackedLinear(blocks, None, 1)(x)
    assert (found - expected).abs().max() < 0.03 * expected.std()
    assert (found - expected).abs().max() > 1e-4 * expected.std()


@pytest.mark.parametrize("form", FORMS)
def test_extreme_numbers(form: str) -> None:
    """The largest integers that there are, and inputs of zeros and of numbers that have no inverse."""
    weight = torch.ones(32, 96)
    weight[::2] = -1
    x = torch.tensor([1.0, -1.0, 0.0, 1e-42, 3e36])[:, None].repeat(1, 96)
    x[3, 40] = 1.0  # the rest of its group is nothing beside it
    blocks = blocks_of(weight, form)
    if form == "int8":
        blocks[5, :, 2:] = 0x80  # −128, which no quantiser of ours makes
    expected = product(x.numpy(), blocks, form, np.zeros(32, np.float32))
    np.testing.assert_array_equal(PackedLinear(blocks, None, 1)(x).numpy(), expected)


@pytest.mark.parametrize("form", FORMS)
def test_infinite_and_undefined_values_stay_in_their_row(form: str) -> None:
    x = torch.randn(5, 48)  # the last group is half empty
    x[1], x[3, 2] = float("nan"), float("inf")
    out = PackedLinear(blocks_of(torch.randn(32, 48), form), None, 1)(x)
    assert out[1].isnan().all()
    assert not out[3].isfinite().any()
    assert out[[0, 2, 4]].isfinite().all()


def kernels_of(form: str, parts: tuple[Halves, ...], most_rows: int, depth: int) -> tuple[Any, Any]:
    """What quantises rows, and x [rows, words], panels [panels, words], bias, out → nothing in tiles of ``parts`` by
    ``most_rows``: compiled anew, for what the module now says of the processor."""
    emit, words = {
        "int8": (quantised.int8_sums, quantised.INT8_WORDS),
        "int4": (quantised.int4_sums, quantised.INT4_WORDS),
    }[form]
    panel = panel_kernel(emit, 4 * words, most_rows, ahead=1, inputs=GROUP, words=True, parts=parts)

    share = quantised.quantise_share
    return njit(share.signatures[0], nogil=True)(share.py_func), product_by(panel, depth)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wide", [True, False], ids=["wide tiles", "narrow tiles"])
def test_every_path_has_the_same_bits(wide: bool, path: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other processors too, as far as this one can compute them."""
    torch.manual_seed(0)
    blocks, bias, x = blocks_of(torch.randn(64, 72), form), torch.randn(64), torch.randn(20, 72)
    layer = PackedLinear(blocks, bias, 1)
    expected, panels = layer(x).numpy(), layer.packed.reshape(len(layer.packed), -1)
    vnni, byte_products = PATHS[path]
    if (path.startswith("VNNI") and not vnni) or (path != "neither" and not byte_products):
        pytest.skip("this processor has no such instruction")
    monkeypatch.setattr(quantised, "_VNNI", vnni)
    monkeypatch.setattr(quantised, "_BYTE_PRODUCTS", byte_products)
    monkeypatch.setattr(quantised, "DIGITS", 1 if vnni else 2)
    digits = quantised.DIGITS if form == "int8" else 1
    quantise, multiply = kernels_of(form, WIDE if wide else NARROW, quantised.TILE_ROWS[wide][digits - 1], 72)
    inputs = np.zeros((len(x), 3 * (digits * quantised.QUADS + 2)), np.float32)
    quantise(0, 1, x.numpy(), form == "int8", inputs)
    for rows in range(1, len(x) + 1):
        out = np.empty((rows, 64), np.float32)
        multiply(inputs[:rows].copy(), panels, layer.bias, out)
        np.testing.assert_array_equal(out, expected[:rows], f"{rows} rows")
