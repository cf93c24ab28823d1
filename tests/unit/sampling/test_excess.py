from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.sampling import accelerator, ops


@pytest.mark.parametrize("width", [1, 7, 8, 9, 1003])
def test_excess_is_what_plain_arithmetic_gives(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    p = torch.randn(5, width, generator=generator).softmax(-1)
    q = torch.randn(3, 4, width, generator=generator).softmax(-1)
    rows, request, slot = np.array([4, 0, 0, 2]), np.array([2, 0, 1, 2]), np.array([3, 0, 2, 1])
    scale = np.array([1.0, 0.5, 0.9, 0.01])
    expected = (scale[:, None] * p[rows].double().numpy() - q[request, slot].double().numpy()).clip(0.0).sum(-1)
    np.testing.assert_allclose(ops.excess(p, rows, scale, q, request, slot), expected, rtol=1e-5, atol=1e-7)
    elsewhere = accelerator.excess(p[rows], torch.from_numpy(scale), q[request, slot])
    np.testing.assert_allclose(elsewhere.numpy(), expected, rtol=1e-5, atol=1e-7)


def test_of_no_rows_there_is_none() -> None:
    nothing = np.zeros(0, np.int64)
    assert ops.excess(torch.ones(2, 3), nothing, np.zeros(0), torch.ones(1, 1, 3), nothing, nothing).shape == (0,)


def test_a_rows_excess_hangs_on_nothing_beside_it() -> None:
    p, q = torch.rand(6, 801), torch.rand(6, 1, 801)
    at, zeros, scale = np.arange(6), np.zeros(6, np.int64), np.linspace(0.1, 1.0, 6)
    together = ops.excess(p, at, scale, q, at, zeros)
    alone = [ops.excess(p, at[i : i + 1], scale[i : i + 1], q, at[i : i + 1], zeros[:1])[0] for i in range(6)]
    assert together.tolist() == alone
