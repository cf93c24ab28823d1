from __future__ import annotations

import pytest

from dynaspec.contract.step import Limits, SpecPlan, StepOutcome, StepView, StopRule

PLAN = SpecPlan(step=3, depth=(4, 0, 2), proposer=(0, 0, 1), nodes=(6, 0, 2), stop=StopRule(below=(0.5,)))
VIEW = StepView(
    step=3,
    ids=("a", "b", "c"),
    context_len=(10, 11, 12),
    room_depth=(1, 2, 3),
    room_nodes=(4, 5, 6),
    max_draft=(None, 0, 7),
    temperature=(0.0, 0.5, 1.0),
    lag=((0, 1, 2), (3, 4, 5)),
    offers=(None, ((1, 1), (2, 2), (3, 3))),
    prefill_tokens=9,
    waiting=1,
    limits=Limits(draft_lens=(0, 1)),
)


def test_with_depth_makes_chains() -> None:
    shorter = PLAN.with_depth((3, 0, 1))
    assert shorter.depth == shorter.nodes == (3, 0, 1)
    assert (shorter.step, shorter.proposer, shorter.stop) == (3, (0, 0, 1), PLAN.stop)
    assert PLAN.depth == (4, 0, 2)


def test_a_selected_plan_keeps_all_columns_in_step() -> None:
    chosen = PLAN.select([2, 0])
    assert (chosen.depth, chosen.proposer, chosen.nodes) == ((2, 4), (1, 0), (2, 6))
    assert (chosen.step, chosen.stop) == (PLAN.step, PLAN.stop)


def test_a_selected_view_keeps_all_columns_in_step() -> None:
    chosen = VIEW.select([2, 0])
    assert chosen.ids == ("c", "a")
    assert chosen.context_len == (12, 10)
    assert (chosen.room_depth, chosen.room_nodes, chosen.max_draft) == ((3, 1), (6, 4), (7, None))
    assert chosen.temperature == (1.0, 0.0)
    assert chosen.lag == ((2, 0), (5, 3))
    assert chosen.offers == (None, ((3, 3), (1, 1)))
    assert (chosen.prefill_tokens, chosen.waiting, chosen.limits) == (9, 1, VIEW.limits)


def test_selecting_everything_changes_nothing() -> None:
    assert VIEW.select(range(3)) == VIEW
    assert PLAN.select(range(3)) == PLAN


@pytest.mark.parametrize("value", [PLAN, VIEW], ids=["plan", "view"])
def test_seam_values_are_frozen_and_hashable(value: SpecPlan | StepView) -> None:
    assert isinstance(hash(value), int)
    with pytest.raises(AttributeError):
        value.step = 4  # type: ignore[misc]


def test_an_outcome_without_work_did_none() -> None:
    outcome = StepOutcome(0, (), (), (), (), (), (), (), (), (), ())
    assert outcome.work.rows_per_pass == ()
    assert (outcome.work.verify_rows, outcome.work.kv_tokens, outcome.work.prefill_rows) == (0, 0, 0)
