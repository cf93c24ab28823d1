"""The policy that stops drafting by confidence: its threshold, learnt and given, and the rule that carries it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import ProposerTraits, StepOutcome, StopRule
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.policies.confidence import (
    MIN_OBSERVATIONS,
    MIN_OF_EACH,
    START,
    WINDOW,
    FittedThreshold,
    best_threshold,
)
from dynaspec.control.registry import build_controller
from unit.control.seam import FIFTY_CASES, Fate, controller, limits, outcome, view


def cost(threshold: float, confidence: np.ndarray, accepted: np.ndarray) -> float:
    """FPR + 3·FNR by their definitions."""
    passes = confidence >= threshold
    return float((passes & ~accepted).sum() / (~accepted).sum() + 3 * (~passes & accepted).sum() / accepted.sum())


observations = st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=2, max_size=40).filter(
    lambda pairs: len({accepted for _, accepted in pairs}) == 2
)


@FIFTY_CASES
@given(observations)
def test_no_threshold_is_better(pairs: list[tuple[int, bool]]) -> None:
    confidence = np.array([level / 20 for level, _ in pairs])
    accepted = np.array([accepted for _, accepted in pairs])
    best = cost(best_threshold(confidence, accepted), confidence, accepted)
    assert best <= min(cost(t, confidence, accepted) for t in np.linspace(0, 1.05, 64)) + 1e-9


def test_it_takes_the_lowest_of_equally_good_ones() -> None:
    confidence = np.array([0.2, 0.4, 0.6, 0.8])
    accepted = np.array([True, False, False, False])
    # At 0.2 nothing is missed and everything passes (cost 1); any other threshold misses the one accepted.
    assert best_threshold(confidence, accepted) == 0.2


def test_a_miss_weighs_three_times_a_needless_token() -> None:
    confidence = np.array([0.1, 0.9, 0.2, 0.3])
    accepted = np.array([True, True, False, False])
    # Above 0.1 half of the accepted are lost (3 · ½), at 0.1 all rejected pass (1).
    assert best_threshold(confidence, accepted) == 0.1


def feed(fit: FittedThreshold, step: StepOutcome, times: int) -> None:
    for _ in range(times):
        fit.observe(step)


SEPARATED = outcome(0, a=Fate(3, 2, True, (0.9, 0.8, 0.3)))


def test_too_few_observations_leave_the_start() -> None:
    fit = FittedThreshold()
    feed(fit, SEPARATED, MIN_OBSERVATIONS // 3)
    assert fit.value == START
    feed(fit, SEPARATED, 1)
    assert fit.value == 0.8


def test_observations_of_one_kind_leave_the_start() -> None:
    fit = FittedThreshold()
    feed(fit, outcome(0, a=Fate(2, 2, False, (0.9, 0.8))), 200)
    assert fit.value == START
    feed(fit, outcome(0, a=Fate(1, 0, True, (0.3,))), MIN_OF_EACH)
    assert fit.value == 0.8


def test_what_lies_behind_the_rejection_is_not_an_observation() -> None:
    fit = FittedThreshold()
    # The third and fourth tokens were never tested in the right context.
    feed(fit, outcome(0, a=Fate(4, 1, True, (0.9, 0.3, 0.95, 0.99))), 40)
    assert fit.value == 0.9


def test_a_run_that_ended_with_the_request_has_no_rejection() -> None:
    fit = FittedThreshold()
    feed(fit, replace(outcome(0, a=Fate(2, 1, True, (0.9, 0.5))), ended=("stopped",)), 200)
    assert fit.value == START


def test_old_observations_are_forgotten() -> None:
    fit = FittedThreshold()
    feed(fit, SEPARATED, WINDOW)
    assert fit.value == 0.8
    feed(fit, outcome(0, a=Fate(2, 1, True, (0.5, 0.1))), WINDOW)
    assert fit.value == 0.5


def test_a_confidence_that_is_no_number_is_left_out() -> None:
    fit = FittedThreshold()
    feed(fit, outcome(0, a=Fate(3, 2, True, (float("nan"), 0.8, 0.3))), 100)
    assert fit.value == 0.8


def test_more_observations_than_the_window_in_one_step() -> None:
    fit = FittedThreshold()
    fates = {f"r{i}": Fate(3, 2, True, (0.9, 0.8, 0.3)) for i in range(WINDOW)}
    fit.observe(outcome(0, **fates))
    assert fit.value == 0.8


def test_proposers_without_confidence_give_no_observations() -> None:
    fit = FittedThreshold()
    feed(fit, outcome(0, a=Fate(3, 2, True)), 100)
    assert fit.value == START


HOST = limits()


def stop(**keys: object) -> StopRule | None:
    return controller(HOST, **keys).plan(view("ab", HOST)).stop


def test_the_rule_has_the_threshold_for_every_pass() -> None:
    rule = stop(draft_confidence_threshold=0.5, num_speculative_tokens=8)
    assert rule == StopRule(below=(0.5,) * 8, scope="batch_mean", signal="confidence")


def test_scope_and_signal_reach_the_rule() -> None:
    rule = stop(draft_confidence_threshold=0.5, draft_confidence_scope="request", signal="token_prob")
    assert rule is not None
    assert (rule.scope, rule.signal) == ("request", "token_prob")


def test_the_configured_length_is_the_maximum() -> None:
    plan = controller(HOST, draft_confidence_threshold=0.5).plan(view("ab", HOST, room_depth=(50, 3)))
    assert plan.depth == (20, 3)


def test_a_threshold_of_zero_never_stops() -> None:
    assert stop(policy="confidence", draft_confidence_threshold=0.0) is None


def test_a_given_threshold_stays() -> None:
    made = controller(HOST, draft_confidence_threshold=0.7)
    for step in range(20):
        made.observe(outcome(step, a=Fate(5, 4, True, (0.9, 0.9, 0.9, 0.8, 0.1))))
    rule = made.plan(view("a", HOST)).stop
    assert rule is not None
    assert rule.below[0] == 0.7


def test_auto_starts_with_the_default_and_follows_what_is_accepted() -> None:
    made = controller(HOST, draft_confidence_threshold="auto")
    before = made.plan(view("a", HOST)).stop
    assert before is not None
    assert before.below[0] == START
    for step in range(20):
        made.observe(outcome(step, a=Fate(5, 4, True, (0.9, 0.9, 0.9, 0.8, 0.6))))
    after = made.plan(view("a", HOST)).stop
    assert after is not None
    assert set(after.below) == {0.8}


def test_a_host_that_cannot_stop_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot stop"):
        controller(limits(can_stop=False), draft_confidence_threshold=0.5)


def test_a_proposer_without_confidence_is_refused() -> None:
    host = limits()
    object.__setattr__(host, "proposers", (ProposerTraits("lookup", has_confidence=False),))
    with pytest.raises(ConfigError, match="'lookup' has no confidence"):
        build_controller(SpeculativeConfig(model="m", policy="confidence"), host)
