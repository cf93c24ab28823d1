from __future__ import annotations

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import ProposerTraits, StopRule
from dynaspec.control import SpeculativeConfig, build_controller
from dynaspec.control.threshold import START
from unit.control.seam import Fate, controller, limits, outcome, view

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
