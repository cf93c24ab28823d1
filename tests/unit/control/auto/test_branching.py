"""Where ``auto`` lets trees branch, and what it learns from walks through them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import DraftView, ProposerTraits, SpecPlan, StepOutcome, StepView, Work
from dynaspec.control.auto import AutoController, CachedPlan
from dynaspec.control.auto.explore import Explorer
from dynaspec.control.auto.learning import Learner
from dynaspec.control.auto.lengths import Target, branch_thresholds
from dynaspec.control.estimate.acceptance import AcceptanceModel, LaterChoices, RequestSlots
from dynaspec.control.estimate.costs import StepCosts
from dynaspec.control.estimate.settings import AutoSettings
from support.closed_loop import LIMITS, Loop, Machine

MODEL = ProposerTraits("draft_model", trees=True)
BRANCHING = replace(LIMITS, proposers=(MODEL,), can_branch=True)


def machine(row_s: float) -> Machine:
    """A pass of 2 ms and so much for each row."""
    return Machine(rows=((1.0, 2e-3), (512.0, 2e-3 + 511 * row_s)), draft_row=1e-8)


class TestThresholds:
    """Of survival, by place in the draft."""

    KNOTS = np.array([1.0, 8.0, 64.0])

    def test_a_straight_line_has_one_price(self) -> None:
        target = Target(self.KNOTS, 2e-3 + 1e-4 * self.KNOTS, 3.0)
        below = branch_thresholds(1e-3, 5e-5, target, 3, 6)
        np.testing.assert_allclose(below, (5e-5 + 1e-4) / 1e-3)

    def test_free_rows_pay_always(self) -> None:
        target = Target(self.KNOTS, np.full(3, 2e-3), 3.0)
        assert branch_thresholds(1e-3, 0.0, target, 3, 6).tolist() == [0.0] * 6

    def test_later_places_stand_on_dearer_stretches_in_larger_batches(self) -> None:
        target = Target(self.KNOTS, np.array([2e-3, 2e-3, 2e-3 + 56 * 1e-4]), 1.0)
        one, four = (branch_thresholds(1e-3, 0.0, replace_rows(target, n), n, 12) for n in (1, 4))
        assert (np.diff(one) >= -1e-12).all()
        assert (np.diff(four) >= -1e-12).all()
        assert (four >= one - 1e-12).all()
        assert one[0] == four[0] == 0.0
        assert four[3] > one[3] == 0.0
        assert four[-1] == pytest.approx(0.1)


def replace_rows(target: Target, rows: int) -> Target:
    return target._replace(rows=float(rows))


def drafting_plans(row_s: float, width: int = 4, steps: int = 150, **limits: Any) -> list[SpecPlan]:
    on = machine(row_s)
    host = replace(BRANCHING, **limits)
    controller = AutoController(host, longest=8, tree=(width, 32), costs=on.costs())
    plans = Loop(2, 1, machine=on, limits=host).run(controller, steps).plans
    return [plan for plan in plans[20:] if any(plan.depth)]


def test_branches_grow_where_rows_are_free() -> None:
    plans = drafting_plans(0.0)
    assert len(plans) > 60
    trees = [plan for plan in plans if plan.tree is not None]
    assert len(trees) > 0.8 * len(plans)
    for plan in trees:
        assert plan.tree is not None
        assert plan.tree.width == 4
        assert max(plan.nodes) <= 32
        assert plan.stop is not None
        assert plan.stop.signal == "survival"


def test_none_grow_where_a_row_takes_more_than_half_of_what_a_token_is_worth() -> None:
    plans = drafting_plans(1.3e-3)
    assert len(plans) > 5  # first choices are tried
    assert all(plan.tree is None for plan in plans)
    assert all(plan.nodes == plan.depth for plan in plans)


@pytest.mark.parametrize(
    "limits", [{"proposers": (replace(MODEL, trees=False),)}, {"can_stop": False}], ids=["chains only", "no stops"]
)
def test_none_grow_where_they_cannot(limits: dict[str, Any]) -> None:
    assert all(plan.tree is None for plan in drafting_plans(0.0, steps=60, **limits))
    assert any(plan.tree is not None for plan in drafting_plans(0.0, steps=60))


def test_a_width_of_one_is_a_chain() -> None:
    assert all(plan.tree is None for plan in drafting_plans(0.0, width=1, steps=60))


def planned(row_s: float, cached: bool = False) -> tuple[Any, StepView, SpecPlan]:
    """A controller, and a plan of it with a tree."""
    on = machine(row_s)
    inner = AutoController(BRANCHING, longest=8, tree=(4, 32), costs=on.costs())
    controller = CachedPlan(inner, BRANCHING) if cached else inner
    loop = Loop(2, 1, machine=on, limits=BRANCHING)
    loop.run(controller, 60)
    for step in range(60, 200):
        view = loop.view(step, [0, 0])
        plan = controller.plan(view)
        if plan.tree is not None and (not cached or inner.holds > 0):
            return controller, view, plan
    raise AssertionError("no tree was planned")


@pytest.mark.parametrize("row_s", [0.0, 4e-4])
def test_what_was_drafted_of_a_tree_is_verified(row_s: float) -> None:
    """Its nodes were chosen by what they are worth: they are no chain, of which the end could be left out."""
    controller, view, plan = planned(row_s)
    size = max(plan.depth) + 3
    confidence = (0.9, *(0.3 for _ in range(size - 1)))
    drafts = DraftView((size, 1), (confidence, (0.5,)), ((2.0,) * size, (0.0,)), parents=((-1,) * size, (-1,)))
    trimmed = controller.trim(view, plan, drafts)
    assert trimmed.nodes == (size, 1)
    assert trimmed.tree == plan.tree


def test_repeated_plans_branch_alike_within_each_requests_room() -> None:
    controller, view, plan = planned(0.0, cached=True)
    again = controller.plan(replace(view, step=view.step + 1, room_nodes=(3, 60)))
    assert again.tree == plan.tree
    assert again.nodes[0] == 3
    assert again.nodes[1] == plan.nodes[1] > 3


# --- what is learnt ---------------------------------------------------------------------------------------------------


def learner(models: list[Any]) -> Learner:
    settings, traits = AutoSettings(), (MODEL,)
    slots = RequestSlots()
    for name in ("a", "b"):
        slot = slots.add(name)
        for model in models:
            model.admit(slot)
    return Learner(
        traits,
        dict(enumerate(models)),
        {},
        StepCosts(PassCosts(), traits, settings),
        Explorer([True], settings),
        slots,
        [LaterChoices(settings)],
    )


def outcome(drafted: tuple[int, ...], accepted: tuple[int, ...], signal: Any, **columns: Any) -> StepOutcome:
    confidence = tuple(tuple(0.5 + 0.04 * j for j in range(n)) for n in drafted)
    ended = tuple("rejected" if a < n else "all_accepted" for n, a in zip(drafted, accepted, strict=True))
    values: dict[str, Any] = {
        "plan_step": 0,
        "ids": ("a", "b"),
        "proposer": (0, 0),
        "requested": drafted,
        "drafted": drafted,
        "verified": drafted,
        "accepted": accepted,
        "emitted": tuple(a + 1 for a in accepted),
        "ended": ended,
        "early_exit": (False, False),
        "confidence": confidence,
        "signal": signal,
        "work": Work(),
    }
    return StepOutcome(**values | columns)


def chain_walk(drafted: int, accepted: int) -> tuple[tuple[int, ...], ...]:
    """As ``tested`` tells a chain."""
    return tuple((j,) if j < accepted else (~j,) for j in range(min(accepted + 1, drafted)))


def test_a_walk_without_branches_teaches_what_the_chain_does() -> None:
    rng = np.random.default_rng(0)
    as_chain, as_tree = AcceptanceModel(), AcceptanceModel()
    one, other = learner([as_chain]), learner([as_tree])
    for _ in range(60):
        drafted = tuple(int(n) for n in rng.integers(1, 7, 2))
        accepted = tuple(int(rng.integers(0, n + 1)) for n in drafted)
        signal = tuple(tuple(rng.normal(1.0, 1.0, n).tolist()) for n in drafted)
        step = outcome(drafted, accepted, signal)
        one.add(step, None)
        other.add(replace(step, tested=tuple(map(chain_walk, drafted, accepted))), None)
        one.learn()
        other.learn()
    for mine, reference in zip(as_tree._state, as_chain._state, strict=True):
        np.testing.assert_array_equal(mine, reference)
    assert not np.array_equal(as_chain._state.bias, AcceptanceModel()._state.bias)
    assert other.later[0].ratio == 1.0  # there was no other choice


class Recorder(AcceptanceModel):
    """Remembers what it is told."""

    def observe(self, *columns: Any) -> None:  # type: ignore[override]
        self.told = [column.tolist() for column in columns]


def test_a_walk_goes_on_in_a_new_run_where_another_choice_was_accepted() -> None:
    model = Recorder()
    taught = learner([model])
    # Of a: the first choice, then the second of three, then none; of b: the third, then the only one.
    tested = (((0,), (~1, 3, ~5), (~6, ~7)), ((~0, ~1, 2), (4,)))
    signal = (tuple(0.1 * j for j in range(8)), tuple(1.0 + 0.1 * j for j in range(5)))
    taught.add(outcome((8, 5), (2, 2), signal, tested=tested), None)
    taught.learn()
    slots, drafted, judged, accepted, told, starts = model.told
    assert slots == taught.slots.of(("a", "a", "b", "b")).tolist()
    assert drafted == judged == [2, 1, 1, 1]
    assert accepted == [1, 0, 0, 1]
    assert starts == [0, 2, 0, 1]
    np.testing.assert_allclose(told, [0.0, 0.1, 0.6, 1.0, 1.4])


def test_how_often_later_choices_are_accepted_is_learnt() -> None:
    rng = np.random.default_rng(3)
    for truth in (0.3, 1.0):
        later = LaterChoices(AutoSettings())
        assert later.ratio == 1.0
        for _ in range(3000):
            probabilities = rng.uniform(0.02, 0.3, 2)
            hit = rng.random() < truth * probabilities.sum()
            which = int(rng.random() < probabilities[1] / probabilities.sum()) if hit else -1
            later.observe(probabilities.tolist(), [node if node == which else ~node for node in range(2)])
        assert later.ratio == pytest.approx(truth, rel=0.35)


def test_later_choices_change_what_a_tree_rule_says() -> None:
    controller, view, before = planned(0.0)
    assert before.tree is not None
    for _ in range(30):
        tested = tuple(((0, ~1, ~2),) for _ in range(2))
        told = outcome((3, 3), (1, 1), ((3.0, 0.0, 0.0),) * 2, ids=view.ids, tested=tested, plan_step=view.step)
        controller.observe(told)
        view = replace(view, step=view.step + 1)
        plan = controller.plan(view)
    assert plan.tree is not None
    assert plan.tree.later < before.tree.later
