"""The likeliest tokens of rows, against sorting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.sampling import ops

scores = st.one_of(st.floats(-100, 100, width=32), st.just(-np.inf), st.sampled_from([0.0, 1.0, 7.5]))
tables = st.integers(1, 70).flatmap(
    lambda width: st.tuples(
        st.integers(1, min(width, 16)), st.lists(st.lists(scores, min_size=width, max_size=width), max_size=4)
    )
)


@given(tables)
@settings(max_examples=150)
def test_top_is_what_sorting_finds(case: tuple[int, list[list[float]]]) -> None:
    count, rows = case
    table = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1 if rows else 16)
    tokens, probability = ops.top(table, count)
    assert (tokens.dtype, probability.dtype) == (np.int64, np.float32)
    assert tokens.shape == probability.shape == (len(rows), count)
    expected = np.argsort(-table.numpy(), axis=-1, kind="stable")[:, :count]
    for row, found, chances, wanted in zip(table, tokens, probability, expected, strict=True):
        possible = int(torch.isfinite(row).sum())
        if not possible:
            assert np.isnan(chances).all()
            continue
        assert found[:possible].tolist() == wanted[:possible].tolist()  # of equals, the lowest id first
        np.testing.assert_allclose(chances, row.softmax(-1).topk(count).values.numpy(), rtol=1e-5, atol=1e-34)
        assert not chances[possible:].any()
        assert ((found >= 0) & (found < len(row))).all()


@pytest.mark.parametrize("width", [16, 17, 255, 256, 257, 512, 1007])
def test_they_may_stand_anywhere(width: int) -> None:
    """Whatever lanes and spans they fall into, in any order."""
    rng = np.random.default_rng(width)
    table = torch.from_numpy(np.stack([rng.permutation(width) for _ in range(20)]).astype(np.float32)) / 8
    tokens, probability = ops.top(table, 5)
    wanted = table.topk(5)
    assert tokens.tolist() == wanted.indices.tolist()
    np.testing.assert_allclose(probability, table.softmax(-1).topk(5).values.numpy(), rtol=1e-5)


def test_a_row_with_nan_says_so() -> None:
    table = torch.zeros(2, 40)
    table[1, 30] = torch.nan
    _, probability = ops.top(table, 3)
    np.testing.assert_allclose(probability[0], 1 / 40, rtol=1e-6)
    assert np.isnan(probability[1]).all()


def test_rows_are_independent() -> None:
    table = torch.randn(9, 300, generator=torch.Generator().manual_seed(0))
    together = ops.top(table, 4)
    for i in range(9):
        for mine, alone in zip(together, ops.top(table[i : i + 1], 4), strict=True):
            np.testing.assert_array_equal(mine[i : i + 1], alone)
