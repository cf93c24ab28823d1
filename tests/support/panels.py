"""Products with panels by a kernel that is compiled in the test, such as one for another processor's registers."""

from __future__ import annotations

from typing import Any

from dynaspec.compiled import njit
from dynaspec.model.kernels.tiles import BOTH, PANEL, Halves

WIDE: tuple[Halves, ...] = (BOTH,)
NARROW: tuple[Halves, ...] = ((0,), (1,))
"""Parts of a panel whose sums are in registers at the same time: where these are wide and many, and where not."""


def product_by(panel: Any, depth: int) -> Any:
    """x [rows, words], panels [panels, words], bias [out], out [rows, out] → nothing.

    Args:
        panel: what ``tiles.panel_kernel`` has made.
        depth: inputs of a row.
    """

    @njit("void(f4[:, ::1], u4[:, ::1], f4[::1], f4[:, ::1])", nogil=True)
    def product(x, panels, bias, out):  # type: ignore[no-untyped-def]
        rows, stride = x.shape
        for number in range(len(panels)):
            weights, column = panels.ctypes.data + number * panels.shape[1] * 4, number * PANEL * 4
            offset, target = bias.ctypes.data + column, out.ctypes.data + column
            panel(x.ctypes.data, rows, stride, depth, weights, offset, target, out.shape[1])

    return product
