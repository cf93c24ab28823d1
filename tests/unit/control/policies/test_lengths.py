"""Heuristic lengths, schedules by batch size, ladders by acceptance."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Controller, Explains, Limits
from dynaspec.control.policies.lengths import RANGES_KEY, Elastic, Range, Schedule, parse_schedule
from unit.control.seam import FIFTY_CASES, Fate, accepted, controller, limits, outcome, rejected, view

HOST = limits()


def depth(made: Controller, request: str = "a", host: Limits = HOST) -> int:
    return made.plan(view(request, host)).depth[0]


@pytest.mark.parametrize("policy", ["heuristic", "heuristic_transient"])
def test_the_published_rule(policy: str) -> None:
    made = controller(HOST, policy=policy)
    lengths = [depth(made)]
    for fate in (accepted(5), accepted(7), rejected(9, after=8), rejected(8), accepted(7)):
        made.observe(outcome(0, a=fate))
        lengths.append(depth(made))
    assert lengths == [5, 7, 9, 8, 7, 9]


def test_it_never_falls_below_one() -> None:
    made = controller(HOST, policy="heuristic", num_speculative_tokens=2)
    depth(made)
    for _ in range(4):
        made.observe(outcome(0, a=rejected(1)))
    assert depth(made) == 1


def test_it_never_falls_below_what_the_host_can_run() -> None:
    host = limits(0, 4, 8)
    made = controller(host, policy="heuristic", num_speculative_tokens=5)
    depth(made, host=host)
    for _ in range(9):
        made.observe(outcome(0, a=rejected(4)))
    assert depth(made, host=host) == 4


def test_it_grows_through_rounded_lengths() -> None:
    host = limits(0, 4, 8)
    made = controller(host, policy="heuristic", num_speculative_tokens=5)
    assert depth(made, host=host) == 4
    for _ in range(2):
        made.observe(outcome(0, a=accepted(4)))
    assert depth(made, host=host) == 8


def test_it_does_not_wind_up_beyond_the_longest() -> None:
    host = limits(0, 2, 6)
    made = controller(host, policy="heuristic", num_speculative_tokens=5)
    depth(made, host=host)
    for _ in range(9):
        made.observe(outcome(0, a=accepted(6)))
    made.observe(outcome(0, a=rejected(6)))
    assert depth(made, host=host) == 2, "6 − 1, rounded down"


@pytest.mark.parametrize(
    "fate", [accepted(3), Fate(requested=5, accepted=0, rejected=False)], ids=["short", "nothing drafted"]
)
def test_a_short_draft_accepted_whole_is_censored(fate: Fate) -> None:
    made = controller(HOST, policy="heuristic")
    depth(made)
    made.observe(outcome(0, a=fate))
    assert depth(made) == 5


def test_a_short_draft_rejected_counts() -> None:
    made = controller(HOST, policy="heuristic")
    depth(made)
    made.observe(outcome(0, a=rejected(2, after=1)))
    assert depth(made) == 4


def test_a_request_that_ended_inside_its_draft_is_censored() -> None:
    made = controller(HOST, policy="heuristic")
    depth(made)
    made.observe(replace(outcome(0, a=rejected(5)), ended=("stopped",)))
    made.forget(["a"])
    assert depth(made, "b") == 5


def test_a_grammars_refusal_counts_as_a_rejection() -> None:
    made = controller(HOST, policy="heuristic")
    depth(made)
    made.observe(replace(outcome(0, a=rejected(5)), ended=("invalid",)))
    assert depth(made) == 4


def test_only_heuristic_carries_the_last_finished_length_over() -> None:
    starts = {}
    for policy in ("heuristic", "heuristic_transient"):
        made = controller(HOST, policy=policy)
        made.plan(view("ab", HOST))
        made.observe(outcome(0, a=accepted(5), b=rejected(5)))
        made.forget(["a"])
        assert depth(made, "b") == 4, "running requests keep theirs"
        starts[policy] = depth(made, "c")
    assert starts == {"heuristic": 7, "heuristic_transient": 5}


def test_a_request_that_never_drafted_carries_nothing_over() -> None:
    made = controller(HOST, policy="heuristic")
    made.plan(view("ab", HOST, max_draft=(0, None)))
    made.observe(outcome(0, b=accepted(5)))
    made.forget(["b"])
    made.forget(["a"])
    assert depth(made, "c") == 7


def test_outcomes_one_step_late_count_once() -> None:
    made = controller(limits(plan_lag=1), policy="heuristic")
    assert depth(made) == depth(made) == 5
    made.observe(outcome(0, a=accepted(5)))
    assert depth(made) == 7
    made.observe(outcome(1, a=accepted(5)))  # planned before the first outcome was known
    assert depth(made) == 7


def test_other_requests_do_not_matter() -> None:
    made = controller(HOST, policy="heuristic")
    made.plan(view("ab", HOST))
    made.observe(outcome(0, b=rejected(5)))
    assert depth(made) == 5


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Range, ...]:
    ranges, low = [], 1
    for _ in range(draw(st.integers(1, 5))):
        high = low + draw(st.integers(0, 6))
        ranges.append((low, high, draw(st.integers(0, 9))))
        low = high + 1 + draw(st.integers(0, 4))
    return tuple(ranges)


def k_of(schedule: tuple[Range, ...], batch: int, cap: int) -> int:
    """The definition: the range that holds the batch size, else the last before it."""
    last = 0
    for low, high, k in schedule:
        if low <= batch:
            last = k
        if low <= batch <= high:
            break
    return min(last, cap)


@FIFTY_CASES
@given(schedules(), st.integers(1, 9))
def test_lengths_are_those_of_the_definition(schedule: tuple[Range, ...], cap: int) -> None:
    parsed = parse_schedule([list(entry) for entry in schedule])
    assert parsed == schedule
    policy = Schedule(parsed, cap)
    found = [policy.length(view(string.ascii_letters[:batch], HOST)) for batch in range(1, 51)]
    assert found == [k_of(schedule, batch, cap) for batch in range(1, 51)]


def test_it_counts_decoding_requests_only() -> None:
    made = controller(HOST, num_speculative_tokens_per_batch_size=[[1, 2, 4], [3, 8, 1]])
    assert made.plan(view("ab", HOST, prefill=900)).depth == (4, 4)
    assert made.plan(view("abc", HOST)).depth == (1, 1, 1)
    assert made.plan(view("abcdefghij", HOST)).depth == (1,) * 10, "beyond the last range"


def test_a_published_schedule_with_a_gap() -> None:
    schedule = Schedule(parse_schedule([[1, 16, 3], [32, 40, 2], [48, 4096, 0]]), cap=3)
    batches = (1, 16, 17, 31, 32, 40, 41, 47, 48, 50)
    found = [schedule.length(view(string.ascii_letters[:batch], HOST)) for batch in batches]
    assert found == [3, 3, 3, 3, 2, 2, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([[2, 8, 3]], "a first range that starts at batch size 1, not 2"),
        ([[1, 8, 3], [8, 9, 2]], r"ranges that do not overlap, but \[1, 8, 3\] comes before \[8, 9, 2\]"),
        ([[1, 8, 3], [20, 30, 2], [10, 12, 1]], r"ranges that ascend, but \[20, 30, 2\] comes before \[10, 12, 1\]"),
        ([[1, 8, 3], [12, 10, 2]], r"low ≤ high in every range, but one is \[12, 10, 2\]"),
        ([[0, 8, 3]], "batch sizes of at least 1"),
        ([[1, 8, -1]], "k of at least 0"),
        ([[1, 8]], r"three integers, but one is \[1, 8\]"),
        ([[1, 8, "3"]], "three integers"),
        ([[1, 8, 2.5]], "three integers"),
        ([[1, True, 2]], "three integers"),
        ([], "at least one range"),
        ({"1-8": 3}, "a list of at least one range"),
        ("[[1, 8, 3]]", "a list of at least one range"),
    ],
    ids=str,
)
def test_what_is_no_schedule_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        controller(HOST, num_speculative_tokens_per_batch_size=value)
    assert str(caught.value).startswith(f"{RANGES_KEY} is {value!r}; expected ")


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


@FIFTY_CASES
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
