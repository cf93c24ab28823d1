from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.bench.passes import (
    Iteration,
    Passes,
    fit_costs,
    fixed,
    oracle,
    step_s,
    stopped,
    tokens_per_second,
    total_s,
)
from unit.bench.texts import known

COSTS = fit_costs({0: 1.0, 1: 1.1, 10: 2.0}, row_s=0.01, pass_s=0.09)

texts = st.lists(st.booleans(), min_size=1, max_size=40).map(known)


def test_a_walk_by_hand():
    #              0     1     2     3      4     5     6
    text = known([True, True, True, False, True, True, True])
    assert fixed(text, 2) == (Iteration(2, 2), Iteration(2, 2))  # 1 2 |3|, 4 5 |6|
    assert fixed(text, 1) == (Iteration(1, 1), Iteration(1, 0), Iteration(1, 1), Iteration(0, 0))
    assert oracle(text) == (Iteration(2, 2), Iteration(2, 2))
    assert fixed(text, 0) == (Iteration(0, 0),) * 6


def test_no_draft_goes_beyond_the_request():
    text = known([True] * 4)
    assert fixed(text, 9) == (Iteration(2, 2),)
    # A request that could have had more is drafted for to its own end, and accepts up to the text's.
    assert fixed(known([True] * 4, max_tokens=20), 9) == (Iteration(9, 2),)


@given(texts, st.integers(0, 12))
def test_every_token_is_emitted_once(text, k):
    for steps in (fixed(text, k), oracle(text)):
        assert Passes.of(steps).tokens == text.tokens - 1
        assert all(step.accepted <= step.drafted for step in steps)


@given(texts, st.integers(0, 12))
def test_the_oracle_wastes_nothing_and_needs_the_fewest_target_passes(text, k):
    best = oracle(text)
    assert all(step.drafted == step.accepted for step in best)
    assert Passes.of(best).target <= Passes.of(fixed(text, k)).target
    if best:
        assert tokens_per_second([best], COSTS) >= tokens_per_second([fixed(text, k)], COSTS) - 1e-9


def test_stopping_keeps_the_token_that_fell_below():
    signal = np.array([[0.9, 0.3, 0.9], [0.2, 0.9, 0.9], [0.9, 0.9, 0.9], [0.5, 0.4, 0.4]])
    assert stopped(signal, 0.5).tolist() == [2, 1, 3, 2]
    assert stopped(signal, [0.0, 0.0, 0.95]).tolist() == [3, 3, 3, 3]
    assert stopped(signal, 0.0).tolist() == [3, 3, 3, 3]


def test_costs_between_and_beyond_what_was_measured():
    found = [step_s(COSTS, k) for k in (0, 1, 4, 10, 20)]
    assert found == pytest.approx([1.0, 1.1, 1.4, 2.0, 3.0], rel=0.03)
    steps = (Iteration(0, 0), Iteration(1, 0), Iteration(1, 1))
    assert total_s(steps, COSTS) == pytest.approx(found[0] + 2 * found[1])


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=9))
def test_a_longer_draft_is_never_cheaper(noise):
    """A measurement that says so has met a busy machine."""
    costs = fit_costs({k: factor * (1.0 + 0.1 * k) for k, factor in enumerate(noise)}, row_s=0.01, pass_s=0.09)
    found = [step_s(costs, k) for k in range(20)]
    assert found == sorted(found)


def test_times_that_fit_are_those_measured():
    """The pass was timed a quarter too short, and rows cost more from a tile on."""
    measured = {k: 9.5 + 2.3 * k + (1.2 if k > 7 else 0.0) for k in (*range(9), 12, 16, 20)}
    costs = fit_costs(measured, row_s=0.2, pass_s=1.6)
    assert [step_s(costs, k) for k in measured] == pytest.approx(list(measured.values()), rel=0.02)


def test_what_was_looked_up_costs_a_row_and_no_pass() -> None:
    steps = (Iteration(6, 4, looked_up=6), Iteration(5, 2, looked_up=4))
    costs = fit_costs({k: 1.0 + 0.11 * k for k in range(9)}, row_s=0.01, pass_s=0.1)
    assert total_s(steps, costs) == pytest.approx(1.06 + 1.15, rel=0.02)
    assert Passes.of(steps) == Passes(target=2, drafter=1, tokens=8)
