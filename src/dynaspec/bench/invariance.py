"""Whether a row of a matrix product comes out bitwise alike alone and beside others, on this machine."""

from __future__ import annotations

import torch

from dynaspec.model.linear import LinearFactory, row_invariant

SHAPES = ((512, 512), (768, 512), (2816, 512), (512, 1408), (4096, 512), (576, 192), (4096, 192))
"""[out, in] of a small target's and a small drafter's layers."""


def check_invariance() -> dict[str, bool]:
    """Tries the CPU's linear layers, by shape; False: exactness would hold only up to rounding."""
    make = LinearFactory(torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(0)
    results = {}
    for rows, columns in SHAPES:
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        results[f"{rows}x{columns}"] = row_invariant(make(weight), columns)
    return results
