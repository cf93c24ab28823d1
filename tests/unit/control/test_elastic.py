from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.controller import Explains
from dynaspec.contract.errors import ConfigError
from dynaspec.control.elastic import Elastic
from unit.control.seam import UNHURRIED, Fate, accepted, controller, limits, outcome, rejected, view

HOST = limits()
SEEN = view("a", HOST)
LADDER = (5, 10, 15, 20)


def at(ladder: tuple[int, ...], acceptance: float) -> int:
    policy = Elastic(ladder)
    hundredths = round(acceptance * 100)
    judged = replace(outcome(0, a=Fate(100, hundredths, False)), verified=(100,))
    for _ in range(400):
        policy.observe(judged)
    return policy.length(SEEN)


@pytest.mark.parametrize(
    ("acceptance", "length"),
    [(0.95, 20), (0.71, 20), (0.69, 15), (0.51, 15), (0.49, 10), (0.31, 10), (0.29, 5), (0.0, 5)],
)
def test_the_rung_follows_the_acceptance(acceptance: float, length: int) -> None:
    assert at(LADDER, acceptance) == length


@pytest.mark.parametrize(
    ("ladder", "lengths"), [((4,), [4, 4, 4, 4]), ((4, 8), [8, 8, 8, 4]), ((5, 10, 15), [15, 10, 10, 5])]
)
def test_short_ladders(ladder: tuple[int, ...], lengths: list[int]) -> None:
    assert [at(ladder, acceptance) for acceptance in (0.9, 0.6, 0.4, 0.1)] == lengths


def test_it_starts_at_a_half_and_moves_by_a_tenth() -> None:
    policy = Elastic((5, 10, 15))
    assert policy.length(SEEN) == 10, "0.5 is not above 0.5"
    policy.observe(outcome(0, a=accepted(5)))
    assert policy.estimates()["acceptance"] == pytest.approx(0.55)
    policy.observe(outcome(1, a=accepted(3), b=Fate(1, 0, True)))
    assert policy.estimates()["acceptance"] == pytest.approx(0.55 + 0.1 * (0.75 - 0.55))


def test_steps_without_drafts_change_nothing() -> None:
    policy = Elastic(LADDER)
    policy.observe(outcome(0, a=Fate(0, 0, False)))
    policy.observe(outcome(1))
    assert policy.estimates()["acceptance"] == 0.5


def test_what_lay_behind_the_end_of_a_request_was_not_judged() -> None:
    policy = Elastic(LADDER)
    policy.observe(replace(outcome(0, a=accepted(2)), verified=(8,), drafted=(8,), ended=("stopped",)))
    assert policy.estimates()["acceptance"] == pytest.approx(0.55)


def test_what_was_drafted_but_trimmed_does_not_count() -> None:
    policy = Elastic(LADDER)
    policy.observe(replace(outcome(0, a=accepted(2)), drafted=(9,)))
    assert policy.estimates()["acceptance"] == pytest.approx(0.55)


@UNHURRIED
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_the_acceptance_stays_a_share(counts: list[tuple[int, int]]) -> None:
    policy = Elastic(LADDER)
    for drafted, hits in counts:
        result = outcome(0, a=Fate(drafted, min(hits, drafted), False))
        policy.observe(replace(result, verified=(drafted,)))
        assert 0.0 <= policy.estimates()["acceptance"] <= 1.0
        assert policy.length(SEEN) in LADDER


def test_all_requests_share_one_length_and_it_says_what_it_believes() -> None:
    made = controller(HOST, policy="elastic")
    assert isinstance(made, Explains)
    assert made.plan(view("abc", HOST)).depth == (10, 10, 10)
    for step in range(20):
        made.observe(outcome(step, a=accepted(10), b=rejected(10)))
    assert made.estimates()["acceptance"] > 0.8
    assert made.plan(view("z", HOST)).depth == (15,)


def test_a_rung_that_the_host_cannot_run_is_rounded_down() -> None:
    host = limits(0, 4, 8)
    assert controller(host, policy="elastic").plan(view("a", host)).depth == (8,)


def test_a_lowest_rung_that_would_end_all_drafting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft_length_options is \[2, 6\] but draft lengths that can run"):
        controller(limits(0, 4, 8), draft_length_options=[2, 6])


@pytest.mark.parametrize(
    ("ladder", "said"),
    [
        ([], "at least one draft length"),
        ([10, 5], "lengths that ascend, but 10 comes before 5"),
        ([5, 5], "lengths that ascend, but 5 comes before 5"),
        ([0, 5], "integers from 1 to 64, but one is 0"),
        ([5, 2.5], "but one is 2.5"),
    ],
    ids=str,
)
def test_what_is_no_ladder_is_refused(ladder: list[object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        controller(HOST, draft_length_options=ladder)
