from __future__ import annotations

import pytest

from dynaspec.contract.errors import ConfigError, IntegrityError
from dynaspec.contract.step import DraftView, StopRule
from dynaspec.control.planner import ChainPlanner
from unit.control.seam import limits, view

STOP = StopRule(below=(0.5,) * 8)


@pytest.mark.parametrize("lens", [(), (1, 2), (0, 2, 2), (0, 3, 1)])
def test_lengths_that_do_not_ascend_from_zero_are_refused(lens: tuple[int, ...]) -> None:
    host = limits()
    object.__setattr__(host, "draft_lens", lens)
    with pytest.raises(ConfigError, match="ascending from 0"):
        ChainPlanner(host)


def test_a_length_is_rounded_down_to_one_that_can_run() -> None:
    host = limits(0, 2, 5)
    plan = ChainPlanner(host).plan(view("abcde", host), (1, 2, 4, 5, 9))
    assert plan.depth == (0, 2, 2, 5, 5)


def test_room_for_nodes_is_a_cap_too() -> None:
    host = limits()
    plan = ChainPlanner(host).plan(view("a", host, room_nodes=(3,)), (5,))
    assert plan.depth == (3,)


def test_a_host_that_is_not_ragged_runs_the_largest_common_length() -> None:
    host = limits(ragged=False)
    plan = ChainPlanner(host).plan(view("abc", host, room_depth=(9, 3, 9)), (5, 5, 4))
    assert plan.depth == (3, 3, 3)


def test_a_negative_room_is_a_bug_of_the_host() -> None:
    host = limits()
    with pytest.raises(IntegrityError, match="-1"):
        ChainPlanner(host).plan(view("a", host, room_depth=(-1,)), (5,))


def test_the_budget_is_kept_when_planning_unless_drafts_may_end_early() -> None:
    host = limits(verify_budget=8)
    seen = view("ab", host, prefill=2)
    plan = ChainPlanner(host).plan(seen, (5, 5))
    assert plan.depth == (2, 2)
    assert plan.verify_nodes == 4
    early = ChainPlanner(host).plan(seen, (5, 5), STOP)
    assert early.depth == (5, 5)
    trimmed = ChainPlanner(host).trim(seen, early, DraftView(length=(5, 1), confidence=((), ())))
    assert trimmed.depth == trimmed.nodes == (3, 1)


def test_a_budget_without_trimming_holds_for_drafts_that_may_end_early() -> None:
    host = limits(verify_budget=6, can_trim=False)
    seen = view("ab", host)
    plan = ChainPlanner(host).plan(seen, (5, 5), STOP)
    assert plan.depth == (2, 2)
    trimmed = ChainPlanner(host).trim(seen, plan, DraftView(length=(2, 1), confidence=((), ())))
    assert trimmed.depth == (2, 1)


def test_requests_take_turns_at_being_last() -> None:
    host = limits(verify_budget=7)
    planner = ChainPlanner(host)
    drafts = DraftView(length=(5, 5, 5), confidence=((), (), ()))
    for step, depth in ((0, (2, 1, 1)), (1, (1, 2, 1)), (2, (1, 1, 2)), (3, (2, 1, 1))):
        seen = view("abc", host, step=step)
        assert planner.plan(seen, (5, 5, 5)).depth == depth
        late = planner.plan(seen, (5, 5, 5), STOP)
        assert planner.trim(seen, late, drafts).depth == depth


def test_a_host_that_is_not_ragged_keeps_one_length_within_the_budget() -> None:
    host = limits(ragged=False, verify_budget=9)
    seen = view("ab", host)
    plan = ChainPlanner(host).plan(seen, (5, 5), STOP)
    assert plan.depth == (3, 3)


def test_an_admitted_length_is_rounded_down_again() -> None:
    host = limits(0, 4, 8, verify_budget=13)
    plan = ChainPlanner(host).plan(view("ab", host), (8, 8))
    assert plan.depth == (4, 4)


def test_a_budget_used_up_by_rows_and_prefill_leaves_plain_decoding() -> None:
    host = limits(verify_budget=3)
    assert ChainPlanner(host).plan(view("ab", host, prefill=9), (5, 5)).depth == (0, 0)


def test_a_step_of_plain_decoding_carries_no_stop_rule() -> None:
    host = limits()
    assert ChainPlanner(host).plan(view("a", host, max_draft=(0,)), (5,), STOP).stop is None


def test_a_trim_that_changes_nothing_returns_the_plan_itself() -> None:
    host = limits()
    seen = view("a", host)
    plan = ChainPlanner(host).plan(seen, (3,))
    assert ChainPlanner(host).trim(seen, plan, DraftView(length=(3,), confidence=((),))) is plan
