from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynaspec.bench.hindsight import (
    Signal,
    best_survival,
    best_threshold,
    best_threshold_per_position,
    confidence_alone,
    fit_acceptance,
    signal,
    survivals,
)
from dynaspec.bench.passes import KnownText, Passes, fit_costs, fixed, oracle, tokens_per_second, walk
from dynaspec.contract.step import LOGIT_RANGE
from unit.bench.texts import known

COSTS = fit_costs({0: 1.0, 1: 1.3, 10: 4.0}, row_s=0.02, pass_s=0.28)
LONGEST = 6


def everywhere(signal: np.ndarray) -> np.ndarray:
    """[n, longest] of a signal [n] that a token has whichever draft it is in."""
    return np.stack([np.roll(signal, -j) for j in range(LONGEST)], axis=1)


def telling(n: int = 300) -> KnownText:
    """Confidence says exactly how likely a token is right; signal says nothing."""
    random = np.random.default_rng(1)
    signal = random.uniform(0.02, 0.98, n)
    return known((random.random(n) < signal).tolist(), everywhere(signal))


def with_evidence(text: KnownText, found: np.ndarray) -> KnownText:
    return replace(text, rollouts=replace(text.rollouts, signal=found))


def all_seeing(text: KnownText) -> KnownText:
    """Evidence says which tokens are right."""
    right = np.arange(LONGEST) < text.rollouts.runs[:, None]
    return with_evidence(text, np.where(right, LOGIT_RANGE, -1.0))


def test_hindsight_uses_the_signal():
    text = [telling()]
    best_fixed = max(tokens_per_second([fixed(text[0], k)], COSTS) for k in range(LONGEST + 1))
    common, by_position = (f(text, COSTS) for f in (best_threshold, best_threshold_per_position))
    survival = best_survival(text, COSTS, confidence_alone)
    bound = tokens_per_second([oracle(text[0])], COSTS)
    assert best_fixed < common.tokens_per_second <= by_position.tokens_per_second < bound
    assert best_fixed < survival.tokens_per_second < bound
    for rule in (by_position, survival):
        found = tokens_per_second([walk(text[0], rule.lengths[0])], COSTS)
        assert rule.tokens_per_second == pytest.approx(found)


def conditional(texts: list[KnownText], told: Signal) -> np.ndarray:
    """[n, longest] fitted chance of each token of the first text."""
    survival = survivals(texts, told)[0]
    return survival / np.column_stack([np.ones(len(survival)), survival[:, :-1]])


def test_a_calibrated_signal_has_weight_one():
    """Each token is as likely as its confidence says."""
    text = telling(3000)
    with_signal = with_evidence(text, confidence_alone(text.rollouts))
    for texts, told in (([text], confidence_alone), ([with_signal], signal)):
        assert fit_acceptance(texts, told).head[1] == pytest.approx(1.0, abs=0.15)
        assert conditional(texts, told)[:, :4] == pytest.approx(text.rollouts.confidence[:, :4], abs=0.06)


def test_a_signal_that_says_nothing_has_no_weight():
    assert fit_acceptance([telling()], signal).head[1] == 0.0
    noise = np.random.default_rng(3).normal(size=(3000, LONGEST))
    assert fit_acceptance([with_evidence(telling(3000), noise)], signal).head[1] == pytest.approx(0.0, abs=0.1)


def test_without_a_signal_the_position_tells():
    """Drafts that get worse with every token."""
    random = np.random.default_rng(2)
    chance = np.array([0.9, 0.7, 0.5, 0.3, 0.3, 0.3])
    right = random.random((4000, LONGEST)) < chance
    text = known([True] * 4000, np.full((4000, LONGEST), 0.5))
    runs = np.cumprod(right, axis=1).sum(axis=1)
    text = replace(text, rollouts=replace(text.rollouts, runs=runs))
    assert conditional([text], signal)[0] == pytest.approx(chance, abs=0.06)


def test_a_signal_is_not_cut():
    """Halving what is told doubles its weight, wherever it lies: nothing is clipped on the way."""
    found = 4.0 * confidence_alone(telling(3000).rollouts)
    assert np.abs(found).max() > 2 * LOGIT_RANGE
    texts = [[with_evidence(telling(3000), scale * found)] for scale in (1.0, 0.5)]
    wide, narrow = (fit_acceptance(each, signal) for each in texts)
    assert narrow.head[1] == pytest.approx(2.0 * wide.head[1], rel=5e-3)
    assert conditional(texts[0], signal) == pytest.approx(conditional(texts[1], signal), abs=5e-3)


def test_where_the_evidence_is_the_confidence_both_rules_are_one():
    text = telling()
    texts = [with_evidence(text, confidence_alone(text.rollouts))]
    by_evidence, by_confidence = (best_survival(texts, COSTS, told) for told in (signal, confidence_alone))
    assert by_evidence.tokens_per_second == by_confidence.tokens_per_second
    assert by_evidence.thresholds == by_confidence.thresholds
    assert by_evidence.lengths[0].tolist() == by_confidence.lengths[0].tolist()


def test_evidence_that_knows_all_wastes_the_one_token_that_it_stops_at():
    text = all_seeing(telling())
    rule = best_survival([text], COSTS, signal)
    steps = walk(text, rule.lengths[0])
    assert all(step.drafted - step.accepted <= 1 for step in steps)
    # Its passes are those of the oracle that may draft as far as it.
    far = walk(text, np.minimum(text.rollouts.runs, LONGEST))
    assert Passes.of(steps).target == Passes.of(far).target
    assert rule.tokens_per_second > best_survival([text], COSTS, confidence_alone).tokens_per_second


def test_certainty_is_a_finite_logit():
    text = known([True, False, True], np.array([[0.0, 0.5, 1.0]] * 3))
    assert confidence_alone(text.rollouts) == pytest.approx(np.array([[-LOGIT_RANGE, 0.0, LOGIT_RANGE]] * 3))
