from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.bench.hindsight import best_survival, best_threshold, best_threshold_per_position, fit_acceptance
from dynaspec.bench.passes import (
    Iteration,
    KnownText,
    Passes,
    StepCosts,
    fixed,
    monotone,
    oracle,
    stopped,
    tokens_per_second,
    walk,
)
from dynaspec.bench.rollout import Rollouts, run_lengths

COSTS = StepCosts({0: 1.0, 1: 1.1, 10: 2.0})


def known(equal: list[bool], confidence: np.ndarray | None = None, max_tokens: int | None = None) -> KnownText:
    n = len(equal)
    if confidence is None:
        confidence = np.ones((n, 4))
    return KnownText(Rollouts(run_lengths(np.array(equal)), confidence), max_tokens or n)


texts = st.lists(st.booleans(), min_size=1, max_size=40).map(known)


def test_runs():
    runs = run_lengths(np.array([True, False, True, True, True]))
    assert runs.tolist() == [1, 0, 3, 2, 1]


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
    assert COSTS.of(0) == 1.0
    assert COSTS.of(4) == pytest.approx(1.4)
    assert COSTS.of(20) == pytest.approx(3.0)
    assert COSTS.total((Iteration(0, 0), Iteration(1, 0))) == pytest.approx(2.1)


@given(st.lists(st.floats(0.1, 9), min_size=2, max_size=10))
def test_monotone_costs(values):
    costs = monotone(dict(enumerate(values)))
    fitted = [costs.seconds[k] for k in range(len(values))]
    assert fitted == sorted(fitted)
    assert sum(fitted) == pytest.approx(sum(values))
    assert monotone(dict(enumerate(sorted(values)))).seconds == pytest.approx(dict(enumerate(sorted(values))))


def telling(n: int = 300) -> KnownText:
    """Confidence says exactly how likely a token is right."""
    random = np.random.default_rng(1)
    signal = random.uniform(0.02, 0.98, n)
    text = known((random.random(n) < signal).tolist())
    confidence = np.stack([np.roll(signal, -j) for j in range(6)], axis=1)
    return KnownText(Rollouts(text.rollouts.runs, confidence), n)


def test_hindsight_uses_the_signal():
    text = [telling()]
    costs = StepCosts({0: 1.0, 1: 1.3, 10: 4.0})
    best_fixed = max(tokens_per_second([fixed(text[0], k)], costs) for k in range(7))
    common, by_position, survival = (
        f(text, costs) for f in (best_threshold, best_threshold_per_position, best_survival)
    )
    bound = tokens_per_second([oracle(text[0])], costs)
    assert best_fixed < common.tokens_per_second <= by_position.tokens_per_second < bound
    assert best_fixed < survival.tokens_per_second < bound
    found = tokens_per_second([walk(text[0], by_position.lengths[0])], costs)
    assert by_position.tokens_per_second == pytest.approx(found)


def test_a_calibrated_signal_has_weight_one():
    weights = fit_acceptance([telling(3000)])
    assert weights[0] == pytest.approx(1.0, abs=0.15)
    assert weights[1:5] == pytest.approx(0.0, abs=0.35)
