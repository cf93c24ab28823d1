"""Products in tiles for other registers than this machine's: the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dynaspec.model.kernels import gemm
from dynaspec.model.kernels.tiles import PANEL, Halves, panel_kernel
from dynaspec.model.packed import PackedLinear
from support.panels import NARROW, WIDE, product_by

DEPTH, OUTPUTS = 72, 64
EMIT: dict[int, tuple[Callable[..., None], int]] = {
    gemm.FLOAT: (gemm._float_sums, 4 * PANEL),
    gemm.BFLOAT: (gemm._bfloat_sums, 2 * PANEL),
}


def layer_of(form: int) -> PackedLinear:
    weight = torch.randn(OUTPUTS, DEPTH)
    return PackedLinear(weight.bfloat16().float() if form == gemm.BFLOAT else weight, torch.randn(OUTPUTS), 1)


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
    product = product_by(panel_kernel(*EMIT[form], most_rows, ahead=1, parts=parts), DEPTH)
    expected, panels = layer(x).numpy(), layer.packed.reshape(len(layer.packed), -1)
    for rows in range(1, len(x) + 1):
        out = np.empty((rows, OUTPUTS), np.float32)
        product(x[:rows].numpy(), panels, layer.bias, out)
        np.testing.assert_array_equal(out, expected[:rows], f"{rows} rows")
