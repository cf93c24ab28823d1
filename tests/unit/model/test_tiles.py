"""Products in tiles for other registers than this machine's: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.compiled import njit
from dynaspec.model.kernels import gemm
from dynaspec.model.kernels.tiles import BOTH, PANEL, Halves, panel_kernel
from dynaspec.model.packed import PackedLinear

DEPTH, OUTPUTS = 72, 64
WIDE: tuple[Halves, ...] = (BOTH,)
NARROW: tuple[Halves, ...] = ((0,), (1,))
EMIT: dict[int, tuple[Callable[..., None], int]] = {
    gemm.FLOAT: (gemm._float_sums, 4 * PANEL),
    gemm.BFLOAT: (gemm._bfloat_sums, 2 * PANEL),
}


def layer_of(form: int) -> PackedLinear:
    weight = torch.randn(OUTPUTS, DEPTH)
    return PackedLinear(weight.bfloat16().float() if form == gemm.BFLOAT else weight, torch.randn(OUTPUTS), 1)


def product_in(parts: tuple[Halves, ...], most_rows: int, form: int) -> Any:
    """x [rows, stride], panels [panels, words], bias, out → nothing, in tiles of ``parts`` by ``most_rows``."""
    panel = panel_kernel(*EMIT[form], most_rows, ahead=1, parts=parts)

    @njit("void(f4[:, ::1], u4[:, ::1], f4[::1], f4[:, ::1])", nogil=True)
    def product(x, panels, bias, out):  # type: ignore[no-untyped-def]
        rows, stride = x.shape
        for number in range(len(panels)):
            weights, column = panels.ctypes.data + number * panels.shape[1] * 4, number * PANEL * 4
            target = out.ctypes.data + column
            offset = bias.ctypes.data + column
            panel(x.ctypes.data, rows, stride, DEPTH, weights, offset, target, out.shape[1])

    return product


@pytest.mark.parametrize("form", EMIT, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("parts", "most_rows"),
    [(WIDE, 14), (NARROW, 6), (NARROW, 1)],
    ids=["32 registers of 16 numbers", "16 registers of 8 numbers", "one row"],
)
def test_products_have_the_same_bits_in_tiles_of_every_size(
    parts: tuple[Halves, ...], most_rows: int, form: int
) -> None:
    torch.manual_seed(0)
    layer, x = layer_of(form), torch.randn(20, DEPTH)
    assert layer.form == form
    product = product_in(parts, most_rows, form)
    expected, panels = layer(x).numpy(), layer.packed.reshape(len(layer.packed), -1)
    for rows in range(1, len(x) + 1):
        out = np.empty((rows, OUTPUTS), np.float32)
        product(x[:rows].numpy(), panels, layer.bias, out)
        np.testing.assert_array_equal(out, expected[:rows], f"{rows} rows")
