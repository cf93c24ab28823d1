from __future__ import annotations

from dataclasses import replace

import pytest

from dynaspec.contract.controller import Controller
from dynaspec.contract.step import Limits
from unit.control.seam import Fate, accepted, controller, limits, outcome, rejected, view

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
