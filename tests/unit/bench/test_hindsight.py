from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynaspec.bench.hindsight import (
    best_survival,
    best_threshold,
    best_threshold_per_position,
    confidence_alone,
    evidence,
    fit_acceptance,
)
from dynaspec.bench.passes import KnownText, Passes, StepCosts, fixed, oracle, tokens_per_second, walk
from dynaspec.contract.step import LOGIT_RANGE
from unit.bench.texts import known

COSTS = StepCosts({0: 1.0, 1: 1.3, 10: 4.0})
LONGEST = 6


def everywhere(signal: np.ndarray) -> np.ndarray:
    """[n, longest] of a signal [n] that a token has whichever draft it is in."""
    return np.stack([np.roll(signal, -j) for j in range(LONGEST)], axis=1)


def telling(n: int = 300) -> KnownText:
    """Confidence says exactly how likely a token is right; evidence says nothing."""
    random = np.random.default_rng(1)
    signal = random.uniform(0.02, 0.98, n)
    return known((random.random(n) < signal).tolist(), everywhere(signal))


def with_evidence(text: KnownText, found: np.ndarray) -> KnownText:
    return replace(text, rollouts=replace(text.rollouts, evidence=found))


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


def test_a_calibrated_signal_has_weight_one():
    text = telling(3000)
    for texts, signal in (
        ([text], confidence_alone),
        ([with_evidence(text, confidence_alone(text.rollouts))], evidence),
    ):
        weights = fit_acceptance(texts, signal)
        assert weights[0] == pytest.approx(1.0, abs=0.15)
        assert weights[1:5] == pytest.approx(0.0, abs=0.35)


def test_evidence_that_says_nothing_has_no_weight():
    assert fit_acceptance([telling()], evidence)[0] == pytest.approx(0.0, abs=1e-9)


def test_evidence_is_not_cut():
    """Halving what is told doubles its weight, wherever it lies: nothing is clipped on the way."""
    found = 4.0 * confidence_alone(telling(3000).rollouts)
    assert np.abs(found).max() > 2 * LOGIT_RANGE
    wide, narrow = (fit_acceptance([with_evidence(telling(3000), scale * found)], evidence) for scale in (1.0, 0.5))
    assert narrow[0] == pytest.approx(2.0 * wide[0], rel=1e-3)
    assert narrow[1:] == pytest.approx(wide[1:], abs=1e-3)


def test_where_the_evidence_is_the_confidence_both_rules_are_one():
    text = telling()
    texts = [with_evidence(text, confidence_alone(text.rollouts))]
    by_evidence, by_confidence = (best_survival(texts, COSTS, signal) for signal in (evidence, confidence_alone))
    assert by_evidence.tokens_per_second == by_confidence.tokens_per_second
    assert by_evidence.thresholds == by_confidence.thresholds
    assert by_evidence.lengths[0].tolist() == by_confidence.lengths[0].tolist()


def test_evidence_that_knows_all_wastes_the_one_token_that_it_stops_at():
    text = all_seeing(telling())
    rule = best_survival([text], COSTS, evidence)
    steps = walk(text, rule.lengths[0])
    assert all(step.drafted - step.accepted <= 1 for step in steps)
    # Its passes are those of the oracle that may draft as far as it.
    far = walk(text, np.minimum(text.rollouts.runs, LONGEST))
    assert Passes.of(steps).target == Passes.of(far).target
    assert rule.tokens_per_second > best_survival([text], COSTS, confidence_alone).tokens_per_second


def test_certainty_is_a_finite_logit():
    text = known([True, False, True], np.array([[0.0, 0.5, 1.0]] * 3))
    assert confidence_alone(text.rollouts).tolist() == [[-LOGIT_RANGE, 0.0, LOGIT_RANGE]] * 3
