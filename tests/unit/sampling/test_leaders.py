from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.sampling import ops

scores = st.one_of(st.floats(-100, 100, width=32), st.just(-np.inf), st.sampled_from([0.0, 1.0, 7.5]))


def by_sorting(rows: torch.Tensor) -> torch.Tensor:
    top = rows.topk(2, dim=-1).values
    return top[:, 0] - top[:, 1]


def lead(rows: torch.Tensor) -> torch.Tensor:
    return ops.leaders(rows)[2]


@given(st.integers(2, 70).flatmap(lambda width: st.lists(st.lists(scores, min_size=width, max_size=width), max_size=4)))
@settings(max_examples=150)
def test_leaders_are_what_sorting_finds(rows: list[list[float]]) -> None:
    table = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1 if rows else 5)
    tokens, probability, lead = ops.leaders(table)
    assert (tokens.dtype, probability.dtype, lead.dtype) == (torch.int64, torch.float32, torch.float32)
    assert tokens.shape == probability.shape == lead.shape == (len(rows),)
    # Bit for bit; NaN where all are −inf.
    np.testing.assert_array_equal(lead.numpy(), by_sorting(table).numpy())
    assert tokens.tolist() == ops.argmax(table).tolist()
    np.testing.assert_allclose(probability.numpy(), ops.probability(table, tokens).numpy(), rtol=1e-5)
    np.testing.assert_allclose(probability.numpy(), table.softmax(-1).amax(-1).numpy(), rtol=1e-5)


@pytest.mark.parametrize("width", [2, 15, 16, 17, 31, 32, 33, 1000, 1007])
def test_the_two_largest_may_stand_anywhere(width: int) -> None:
    """Whatever lanes they fall into, and in either order."""
    at = sorted({0, 1, width // 2, width - 2, width - 1} | ({15, 16} & set(range(width))))
    pairs = [(first, second) for first in at for second in at if first != second]
    table = torch.full((len(pairs), width), -3.0)
    for row, (first, second) in enumerate(pairs):
        table[row, first], table[row, second] = 2.5, 1.0
    tokens, _, lead = ops.leaders(table)
    assert tokens.tolist() == [first for first, _ in pairs]
    assert lead.tolist() == [1.5] * len(pairs)


def test_of_equals_the_lowest_is_first_and_none_leads() -> None:
    table = torch.full((4, 40), -1.0)
    table[0, [35, 3]] = 4.0
    table[1, [16, 0]] = 4.0  # both of one lane
    table[2, [39, 17]] = 4.0
    tokens, _, lead = ops.leaders(table)
    assert tokens.tolist() == [3, 0, 17, 0]
    assert lead.tolist() == [0.0] * 4


def test_one_that_is_alone_leads_by_any_amount() -> None:
    table = torch.full((1, 20), -torch.inf)
    table[0, 18] = 0.0
    assert [part.tolist() for part in ops.leaders(table)] == [[18], [1.0], [float("inf")]]


@pytest.mark.parametrize("at", [0, 15, 16, 33])
def test_a_row_that_is_no_numbers_is_found_out(at: int) -> None:
    table = torch.zeros(2, 34)
    table[0, 20] = 5.0
    table[0, at] = torch.nan
    tokens, probability, _ = ops.leaders(table)
    assert 0 <= int(tokens[0]) < 34
    assert probability.isnan().tolist() == [True, False]


def test_rows_need_not_lie_next_to_each_other() -> None:
    table = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (6, 50)).astype(np.float32))
    for part in (table[:, :37], table[::2], table[1:, 3:]):
        np.testing.assert_array_equal(lead(part).numpy(), by_sorting(part).numpy())


def test_scores_are_left_as_they_were() -> None:
    table = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (2, 33)).astype(np.float32))
    before = table.clone()
    ops.leaders(table)
    assert torch.equal(table, before)


def test_of_logits_the_lead_is_the_ratio_of_the_two_largest_probabilities() -> None:
    table = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (5, 33)).astype(np.float32))
    top = table.softmax(-1).topk(2, dim=-1).values
    assert lead(table).tolist() == pytest.approx((top[:, 0] / top[:, 1]).log().tolist(), rel=1e-4)
