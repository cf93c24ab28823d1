"""Products in tiles for other registers than this machine's: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.compiled import njit
from dynaspec.model.kernels import gemm
from dynaspec.model.packed import PackedLinear
from support.quantised import blocks_of

DEPTH, OUTPUTS = 72, 64
WIDE: tuple[gemm.Halves, ...] = (gemm.BOTH,)
NARROW: tuple[gemm.Halves, ...] = ((0,), (1,))
EMIT: dict[int, tuple[Callable[..., None], dict[str, int]]] = {
    gemm.FLOAT: (gemm._float_sums, {"size": 4 * gemm.PANEL}),
    gemm.BFLOAT: (gemm._bfloat_sums, {"size": 2 * gemm.PANEL}),
    gemm.INT8: (gemm._int8_sums, {"size": 4 * gemm.GROUP_WORDS // gemm.GROUP}),
    gemm.INT4: (gemm._int4_sums, {"size": 4 * gemm.INT4_WORDS * gemm.NIBBLES // gemm.GROUP, "inputs": gemm.NIBBLES}),
}


def layer_of(form: int) -> PackedLinear:
    weight = torch.randn(OUTPUTS, DEPTH)
    if form in (gemm.INT8, gemm.INT4):
        return PackedLinear(blocks_of(weight, "int8" if form == gemm.INT8 else "int4"), torch.randn(OUTPUTS), 1)
    return PackedLinear(weight.bfloat16().float() if form == gemm.BFLOAT else weight, torch.randn(OUTPUTS), 1)


def product_in(parts: tuple[gemm.Halves, ...], most_rows: int, form: int) -> Any:
    """x [rows, stride], panels [panels, words], bias, out → nothing, in tiles of ``parts`` by ``most_rows``."""
    emit, sizes = EMIT[form]
    panel = gemm._panel_kernel(emit, **sizes, most_rows=most_rows, parts=parts)

    @njit("void(f4[:, ::1], u4[:, ::1], f4[::1], f4[:, ::1])", nogil=True)
    def product(x, panels, bias, out):  # type: ignore[no-untyped-def]
        rows, stride = x.shape
        for number in range(len(panels)):
            weights, column = panels.ctypes.data + number * panels.shape[1] * 4, number * gemm.PANEL * 4
            target = out.ctypes.data + column
            offset = bias.ctypes.data + column
            panel(x.ctypes.data, rows, stride, DEPTH, weights, offset, target, out.shape[1])

    return product


@pytest.mark.parametrize("form", EMIT, ids=["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(
    ("parts", "most_rows", "table"),
    [(WIDE, 14, gemm.HAS_AVX512), (NARROW, 6, False), (NARROW, 1, False)],
    ids=["32 registers of 16 numbers", "16 registers of 8 numbers", "one row"],
)
def test_products_have_the_same_bits_in_tiles_of_every_size(
    parts: tuple[gemm.Halves, ...], most_rows: int, table: bool, form: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x = layer_of(form), torch.randn(20, DEPTH)
    assert layer.form == form
    monkeypatch.setattr(gemm, "HAS_AVX512", table)  # without AVX-512 int4 has no look-up
    product = product_in(parts, most_rows, form)
    inputs = x.numpy()
    if form == gemm.INT4:
        groups = -(-DEPTH // gemm.GROUP)
        inputs = np.zeros((len(x), groups * gemm.GROUP + groups), np.float32)
        gemm._sum_share(0, 1, x.numpy(), inputs)
    expected, panels = layer(x).numpy(), layer.packed.reshape(len(layer.packed), -1)
    for rows in range(1, len(x) + 1):
        out = np.empty((rows, OUTPUTS), np.float32)
        product(inputs[:rows].copy(), panels, layer.bias, out)
        np.testing.assert_array_equal(out, expected[:rows], f"{rows} rows")
