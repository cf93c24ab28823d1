"""What is settled for some steps: the same plans without another look, until something is learnt or changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dynaspec.contract.step import Ended, SpecPlan, StepOutcome, StepView, Work
from dynaspec.control.auto import AutoController
from support.closed_loop import COSTS, LIMITS, LONGEST, Loop, target_s

PASS_S = 2e-3


def auto() -> AutoController:
    return AutoController(LIMITS, longest=LONGEST, costs=COSTS)


def view(
    step: int, ids: Sequence[str] = ("a", "b"), *, prefill: int = 0, lag: int | None = 0, room: int = 99
) -> StepView:
    rooms = (room,) * len(ids)
    return StepView(
        step=step,
        ids=tuple(ids),
        context_len=(50,) * len(ids),
        room_depth=rooms,
        room_nodes=rooms,
        max_draft=(None,) * len(ids),
        temperature=(0.0,) * len(ids),
        lag=() if lag is None else ((lag,) * len(ids),),
        offers=(None,),
        prefill_tokens=prefill,
        waiting=0,
        limits=LIMITS,
    )


def outcome(seen: StepView, plan: SpecPlan, *, right: bool, verify_s: float | None = None) -> StepOutcome:
    """Of a step whose drafts are all right, or all wrong."""
    accepted = plan.depth if right else (0,) * len(plan.depth)
    ended: Ended = "all_accepted" if right else "rejected"
    drafting = sum(map(bool, plan.depth))
    passes = (drafting,) * max(plan.depth)
    rows = sum(plan.depth) + len(plan.depth)
    verify_s = target_s(rows) if verify_s is None else verify_s
    return StepOutcome(
        plan_step=seen.step,
        ids=seen.ids,
        proposer=plan.proposer,
        requested=plan.depth,
        drafted=plan.depth,
        verified=plan.depth,
        accepted=accepted,
        emitted=tuple(n + 1 for n in accepted),
        ended=tuple(ended if depth else "none" for depth in plan.depth),
        early_exit=(False,) * len(plan.depth),
        confidence=tuple((0.5,) * depth for depth in plan.depth),
        work=Work(rows_per_pass=passes, verify_rows=rows, kv_tokens=100),
        draft_s=4e-4 * len(passes),
        verify_s=verify_s,
        step_s=4e-4 * len(passes) + verify_s + 1e-4,
    )


def gives_up(controller: AutoController) -> int:
    """Wrong drafts until plain decoding goes on by itself; the next step."""
    for step in range(400):
        seen = view(step)
        plan = controller.plan(seen)
        controller.observe(outcome(seen, plan, right=False))
        if plan.next_needs == "nothing":
            return step + 1
    raise AssertionError("drafts went on")


def test_calm_plain_decoding_needs_nothing_of_proposers_and_serves_whoever_comes() -> None:
    controller = auto()
    step = gives_up(controller)
    plan = controller.plan(view(step, ("c", "b"), prefill=20, lag=None))
    assert plan.depth == (0, 0)


def test_steps_in_which_a_request_begins_are_among_those_that_tell_what_plain_decoding_takes() -> None:
    """They take longer than the others: left out, plain decoding would look faster than it is."""
    controller = auto()
    first, seconds = gives_up(controller), 0.0
    for step in range(first, first + 1000):
        begins = step % 5 == 0
        seen = view(step, (str(step // 5), "b"))
        plan = controller.plan(seen)
        came = outcome(seen, plan, right=False)
        controller.observe(replace(came, step_s=came.step_s + (1.8e-3 if begins else 0.0)))
        seconds += came.step_s + (1.8e-3 if begins else 0.0)
    found = controller.estimates()
    assert found["mode"] == "plain"
    assert found["plain_goodput"] * found["plain_correction"] == pytest.approx(2 * 1000 / seconds, rel=0.06)


def test_another_load_is_looked_at_and_costs_one_step_where_nobody_foresaw_it() -> None:
    controller = auto()
    step = gives_up(controller)
    ids = [str(i) for i in range(9)]
    first = controller.plan(view(step, ids, lag=None))
    assert first.depth == (0,) * 9
    assert first.next_needs == "all"
    seen = view(step + 1, ids)
    controller.plan(seen)
    assert controller.estimates()["plain_goodput"] > 5 / PASS_S  # of nine requests, not of two


def test_the_step_before_a_decision_asks_for_all_that_it_may_need() -> None:
    controller = auto()
    first = gives_up(controller)
    needs: list[str] = []
    for step in range(first, first + 400):
        foreseen = not needs or needs[-1] != "nothing"
        seen = view(step, lag=0 if foreseen else None)
        plan = controller.plan(seen)
        if any(plan.depth):
            assert foreseen
            break
        needs.append(plan.next_needs)
        controller.observe(outcome(seen, plan, right=False))
    assert "nothing" in needs
    assert any(plan.depth)  # a trial


def test_plans_repeat_until_a_request_has_little_room() -> None:
    controller = auto()
    step, agreed = 0, controller._agreement
    while step < 60 or agreed is None or agreed.steps < 2:  # what is agreed now holds for two more steps
        seen = view(step)
        plan = controller.plan(seen)
        controller.observe(outcome(seen, plan, right=True))
        step, agreed = step + 1, controller._agreement
    assert min(plan.depth) > 2
    short = controller.plan(view(step, room=2))
    assert short.depth == (2, 2)
    assert replace(short, step=plan.step) == plan.with_depth((2, 2))
    assert controller.plan(view(step + 1)).depth == plan.depth


def settled(*ids: str) -> tuple[AutoController, int]:
    """A controller whose agreement on drafting for these holds for two more steps; the next step."""
    controller = auto()
    for step in range(200):
        seen = view(step, ids)
        controller.observe(outcome(seen, controller.plan(seen), right=True))
        if step > 60 and controller._agreement is not None and controller._agreement.steps == 2:
            return controller, step + 1
    raise AssertionError("nothing was settled for several steps")


def test_who_takes_another_ones_place_gets_what_the_others_have() -> None:
    controller, step = settled("a", "b", "c", "d")
    before = controller.plan(view(step, ("a", "b", "c", "d")))
    agreed = controller._agreement
    assert agreed is not None
    assert before.stop is not None
    after = controller.plan(view(step + 1, ("b", "new", "a", "d")))
    assert controller._agreement is not None
    assert controller._agreement.steps == 0  # it was not settled anew
    assert min(after.depth) == max(after.depth) == max(before.depth) > 2
    old = before.stop.offset
    assert after.stop == replace(before.stop, offset=(old[1], 0.0, old[0], old[3]))


def test_a_step_with_little_room_leaves_the_next_ones_theirs() -> None:
    """With a step in flight there is less room than there turns out to be."""
    controller, step = settled("a", "b", "c", "d")
    ids = ("b", "new", "a", "d")
    assert controller.plan(view(step, ids, room=2)).depth == (2,) * 4
    assert controller._agreement is not None
    assert controller._agreement.steps == 1
    assert min(controller.plan(view(step + 1, ids)).depth) > 2


@pytest.mark.parametrize("can_stop", [True, False])
def test_plans_that_repeat_keep_to_a_budget_that_the_host_does_not_trim_to(can_stop: bool) -> None:
    limits = replace(LIMITS, can_trim=False, can_stop=can_stop, verify_budget=10)
    controller, drafted = AutoController(limits, longest=LONGEST, costs=COSTS), 0
    for step in range(120):
        seen = replace(view(step, ("a", "b", "c", str(step // 7))), limits=limits)
        plan = controller.plan(seen)
        assert sum(plan.depth) <= 10 - 4
        drafted += sum(plan.depth)
        controller.observe(outcome(seen, plan, right=True))
    assert drafted > 3 * 120


def test_nothing_is_drafted_for_a_new_one_of_which_too_much_would_have_to_be_read() -> None:
    controller, step = settled("a", "b", "c", "d")
    seen = view(step, ("a", "b", "c", "new"))
    plan = controller.plan(replace(seen, lag=((0, 0, 0, 10**7),)))
    assert plan.depth[3] == 0 < min(plan.depth[:3])


@pytest.mark.parametrize("ids", [("e", "f", "g", "h"), ("a",), ("a", "b", "c", "d", "e", "f")])
def test_others_altogether_or_many_more_or_fewer_are_settled_for_anew(ids: tuple[str, ...]) -> None:
    controller, step = settled("a", "b", "c", "d")
    controller.plan(view(step, ids))
    assert controller._agreement is not None
    assert controller._agreement.ids == ids
    assert controller._agreement.settled_for == len(ids)
    assert controller._agreement.steps > 1  # one was left of the former
    controller, step = settled("a", "b", "c", "d")
    controller.plan(view(step, ("a", "b", "c", "e", "f")))
    assert controller._agreement is not None
    assert controller._agreement.settled_for == 4


def test_what_is_expected_of_fewer_is_what_would_be_settled_for_them() -> None:
    controller, step = settled("a", "b", "c", "d")
    controller.plan(view(step, ("a", "b", "c")))
    agreed = controller._agreement
    assert agreed is not None
    assert agreed.settled_for == 4
    anew = controller._negotiate(view(step, ("a", "b", "c")))
    assert agreed.plain.emitted == anew.plain.emitted
    assert agreed.plain.seconds == pytest.approx(anew.plain.seconds, rel=0.01)
    assert agreed.speculation.goodput == pytest.approx(anew.speculation.goodput, rel=0.25)
    assert agreed.expected == pytest.approx(agreed.speculation.goodput, rel=0.05)


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_depends_on_how_steps_are_numbered(seed: int) -> None:
    """Of steps alike one in two or three is weighed; which ones, their numbers say: any start does."""

    class Shifted:
        """Hands a controller the steps of a run that began earlier."""

        def __init__(self, inner: AutoController) -> None:
            self._inner = inner

        def plan(self, seen: StepView) -> SpecPlan:
            return replace(self._inner.plan(replace(seen, step=seen.step + 1000)), step=seen.step)

        def trim(self, seen: StepView, plan: SpecPlan, drafts: object) -> SpecPlan:
            moved = self._inner.trim(replace(seen, step=seen.step + 1000), plan, drafts)  # type: ignore[arg-type]
            return replace(moved, step=seen.step)

        def observe(self, seen: StepOutcome) -> None:
            self._inner.observe(replace(seen, plan_step=seen.plan_step + 1000))

        def forget(self, ids: Sequence[str]) -> None:
            self._inner.forget(ids)

    here, there = (Loop(1, seed).run(controller, 600).goodput for controller in (auto(), Shifted(auto())))
    assert there == pytest.approx(here, rel=0.05)


def test_a_name_may_be_used_again() -> None:
    """That of an ended request, for another one, whose place outlasts the books on the first."""
    controller = auto()
    for step in range(30):
        seen = view(step, ("a",))
        controller.observe(outcome(seen, controller.plan(seen), right=True))
    controller.forget(["a"])
    seen = view(30, ("a", "b"))
    plan = controller.plan(seen)
    for step in range(30, 40):
        controller.observe(replace(outcome(seen, plan, right=True), plan_step=step))
    assert (controller._places.find(["a", "b"]) >= 0).all()


def test_a_step_after_long_prompts_tells_nothing_of_what_steps_cost() -> None:
    """The same steps, of which the slow one comes right after the prompts, or one later."""

    def plain_s(*slowness: float) -> float:
        controller = auto()
        for step in range(60):
            seen = view(step)
            plan = replace(controller.plan(seen), depth=(0, 0), nodes=(0, 0), stop=None)
            verify_s = 20 * PASS_S if step % 3 == 0 else slowness[step % 3 - 1] * PASS_S
            came = outcome(seen, plan, right=True, verify_s=verify_s)
            if step % 3 == 0:
                came = replace(came, work=replace(came.work, prefill_rows=200))
            controller.observe(came)
        found: float = controller.estimates()["target_curve"][1][1]
        return found

    assert plain_s(1.6, 1.0) < 0.9 * plain_s(1.0, 1.6)


def test_the_first_steps_of_a_host_that_was_measured_tell_nothing_of_costs() -> None:
    def plain_s(slow: int) -> float:
        """After steps of plain decoding of which the first ``slow`` took twenty times as long."""
        controller = auto()
        for step in range(14):
            seen = view(step)
            plan = replace(controller.plan(seen), depth=(0, 0), nodes=(0, 0), stop=None)
            controller.observe(outcome(seen, plan, right=True, verify_s=PASS_S * (20 if step < slow else 1)))
        found: float = controller.estimates()["target_curve"][1][1]
        return found

    assert plain_s(10) == plain_s(0) < plain_s(12)


def test_host_time_of_steps_that_draft_is_not_that_of_plain_ones() -> None:
    controller = auto()
    for step in range(80):
        seen = view(step)
        plan = controller.plan(seen)
        came = outcome(seen, plan, right=True)
        extra = 2e-3 if any(plan.depth) else 0.0
        controller.observe(replace(came, step_s=came.step_s + extra))
    learner = controller._learner
    assert learner.host_s(drafts=True) == pytest.approx(2.1e-3)
    assert learner.host_s(drafts=False) == learner.host_s(drafts=True)  # as long as nothing is known of it
    for step in range(80, 120):
        seen = view(step)
        plan = replace(controller.plan(seen), depth=(0, 0), nodes=(0, 0), stop=None)
        controller.observe(outcome(seen, plan, right=True))
    assert learner.host_s(drafts=False) == pytest.approx(1e-4)
