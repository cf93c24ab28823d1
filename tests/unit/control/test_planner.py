"""From wished lengths to a plan that the host can run: levels, room, budget, common lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.errors import ConfigError, IntegrityError
from dynaspec.contract.step import DraftView, StopRule, TreeRule
from dynaspec.contract.tree import TokenTree
from dynaspec.control.planner import ChainPlanner, admit
from unit.control.seam import FIFTY_CASES, limits, view


def one_by_one(lengths: list[int], budget: int, first: int) -> tuple[int, ...]:
    """The definition, slot by slot."""
    admitted = [0] * len(lengths)
    for position in range(max(lengths, default=0)):
        for offset in range(len(lengths)):
            request = (first + offset) % len(lengths)
            if lengths[request] > position and sum(admitted) < budget:
                admitted[request] += 1
    return tuple(admitted)


@FIFTY_CASES
@given(st.lists(st.integers(0, 9), max_size=7), st.integers(0, 40), st.integers(0, 20))
def test_it_is_the_slot_by_slot_definition(lengths: list[int], budget: int, first: int) -> None:
    assert admit(lengths, budget, first) == one_by_one(lengths, budget, first)


def test_the_last_round_starts_where_it_is_told() -> None:
    assert admit((3, 3, 3), 4, first=0) == (2, 1, 1)
    assert admit((3, 3, 3), 4, first=2) == (1, 1, 2)
    assert admit((3, 3, 3), 4, first=3) == (2, 1, 1)


def test_a_budget_that_suffices_changes_nothing() -> None:
    assert admit((3, 0, 5), 8) == (3, 0, 5)


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


def test_rooms_are_caps() -> None:
    host = limits()
    plan = ChainPlanner(host).plan(view("ab", host, room_depth=(3, 9)), (5, 5))
    assert plan.depth == plan.nodes == (3, 5)


class TestBranch:
    """Chains of these lengths become trees."""

    def test_sizes_are_within_every_limit(self) -> None:
        host = limits(can_branch=True)
        seen = view("abcde", host, room_nodes=(50, 7, 2, 50, 50), max_draft=(None, None, None, 6, 0))
        planner = ChainPlanner(host)
        plan = planner.branch(seen, planner.plan(seen, (4, 4, 4, 9, 4)), 12, TreeRule(3))
        assert plan.nodes == (12, 7, 2, 6, 0)
        assert plan.depth == (4, 4, 2, 6, 0)
        assert plan.tree == TreeRule(3)

    def test_of_a_shape_what_the_depth_holds(self) -> None:
        shape = TokenTree.parse([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
        host = limits(can_branch=True)
        seen = view(
            "abcde", host, room_depth=(1, 2, 3, 9, 0), room_nodes=(60,) * 5, max_draft=(None, None, None, 4, None)
        )
        planner = ChainPlanner(host)
        plan = planner.branch(seen, planner.plan(seen, (3,) * 5), 6, TreeRule(2, shape=shape))
        assert plan.nodes == (2, 5, 6, 4, 0)
        assert plan.depth == (1, 2, 3, 3, 0)

    def test_a_trim_keeps_a_beginning_and_the_rule(self) -> None:
        host = limits(can_branch=True, verify_budget=12)
        seen = view("ab", host)
        planner = ChainPlanner(host)
        plan = planner.branch(seen, planner.plan(seen, (3, 3), STOP), 12, TreeRule(3))
        drafts = DraftView((9, 4), ((0.5,) * 9, (0.5,) * 4), parents=((-1,) * 9, (-1,) * 4))
        trimmed = planner.trim(seen, plan, drafts)
        assert sum(trimmed.nodes) == 10
        assert trimmed.nodes[1] == 4
        assert trimmed.depth == (3, 3)
        assert trimmed.tree == plan.tree


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
