"""Whole steps of a number of rows that has not been seen before, for which a host may have had to make kernels."""

from __future__ import annotations

import pytest

from dynaspec.contract.costs import PassCosts
from dynaspec.control.auto.costs import StepCosts


@pytest.fixture
def costs() -> StepCosts:
    """After steps of 8 rows, 10 ms each."""
    found = StepCosts(PassCosts(), [True])
    for _ in range(20):
        found.observe_whole(8, 0, 0.0, 0.010, None)
    return found


def test_the_first_step_of_a_number_of_rows_is_no_measure(costs: StepCosts) -> None:
    before = costs.pass_s(16, 0, 0.0)
    costs.observe_whole(16, 0, 0.0, 0.050, None)
    assert costs.pass_s(16, 0, 0.0) == before
    costs.observe_whole(16, 0, 0.0, 0.010, None)
    assert costs.pass_s(16, 0, 0.0) != before


def test_where_hardly_any_number_occurs_twice_they_are(costs: StepCosts) -> None:
    for rows in range(20, 80):
        costs.observe_whole(rows, 0, 0.0, 0.030, None)
    assert costs.pass_s(50, 0, 0.0) == pytest.approx(0.030, rel=0.15)
