from __future__ import annotations

from typing import get_args

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import DraftView
from dynaspec.control import POLICIES, build_controller
from dynaspec.control.config import MAX_DRAFT_TOKENS, Policy, SpeculativeConfig
from dynaspec.control.resolve import POLICIES as POLICY_NAMES
from unit.control.seam import accepted, controller, limits, outcome, view


def test_every_policy_name_has_a_builder() -> None:
    allowed = get_args(get_args(Policy)[0])
    assert tuple(POLICIES) == POLICY_NAMES == allowed


def test_no_configuration_is_plain_decoding() -> None:
    host = limits()
    made = build_controller(None, host)
    seen = view("ab", host)
    plan = made.plan(seen)
    assert plan.depth == plan.nodes == plan.proposer == (0, 0)
    assert made.trim(seen, plan, DraftView(length=(0, 0), confidence=((), ()))) is plan


def test_constant_is_constant() -> None:
    host = limits()
    made = controller(host, num_speculative_tokens=3)
    made.plan(view("a", host))
    made.observe(outcome(0, a=accepted(3)))
    assert made.plan(view("ab", host)).depth == (3, 3)


@pytest.mark.parametrize("lens", [(0,), (0, 4, 8)])
def test_a_length_that_the_host_cannot_run_is_refused(lens: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is 3"):
        controller(limits(*lens), num_speculative_tokens=3)


def test_the_off_switch_counts_decoding_requests_only() -> None:
    host = limits()
    made = controller(host, disable_by_batch_size=2)
    assert made.plan(view("ab", host, prefill=500)).depth == (5, 5)
    assert made.plan(view("abc", host)).depth == (0, 0, 0)


def test_the_off_switch_composes_with_a_policy_that_learns() -> None:
    host = limits()
    made = controller(host, policy="heuristic", disable_by_batch_size=1)
    made.plan(view("a", host))
    assert made.plan(view("ab", host)).depth == (0, 0)
    made.observe(outcome(0, a=accepted(5)))
    assert made.plan(view("a", host)).depth == (7,)
    made.forget(["a"])
    assert made.plan(view("c", host)).depth == (7,)


@pytest.mark.parametrize(
    ("keys", "longest"),
    [({}, 5), ({"draft_confidence_threshold": 0.4}, 20), ({"policy": "heuristic"}, MAX_DRAFT_TOKENS)],
)
def test_the_longest_draft_is_known_beforehand(keys: dict, longest: int) -> None:
    config = SpeculativeConfig(model="m", **keys)
    assert config.longest_draft == longest
    host = limits(*range(longest + 1))
    made = build_controller(config, host)
    made.plan(view("a", host))
    for _ in range(100):
        made.observe(outcome(0, a=accepted(longest)))
    assert made.plan(view("a", host)).depth == (longest,)
