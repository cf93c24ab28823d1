"""Plans that are repeated where steps are short."""

from __future__ import annotations

from dataclasses import replace

from dynaspec.contract.step import Limits, ProposerTraits, StepOutcome, StepView
from dynaspec.control.auto import AutoController, CachedPlan
from support.closed_loop import COSTS, LIMITS, SMALL_PAIR, Loop, Machine, with_traits


class Counted(AutoController):
    plans = 0

    def plan(self, view: StepView):  # type: ignore[no-untyped-def]
        self.plans += 1
        return super().plan(view)


def cached(machine: Machine = SMALL_PAIR, limits: Limits = LIMITS) -> tuple[CachedPlan, Counted]:
    inner = Counted(limits, longest=16, costs=machine.costs())
    return CachedPlan(inner, limits), inner


def test_short_steps_are_planned_rarely_and_long_ones_each() -> None:
    slow = replace(SMALL_PAIR, rows=tuple((n, 100 * s) for n, s in SMALL_PAIR.rows), host=0.3)
    for machine, most, least in ((SMALL_PAIR, 160, 0), (slow, 400, 400)):
        controller, inner = cached(machine)
        Loop(1, 1, machine=machine).run(controller, 400)
        assert least <= inner.plans <= most


def test_a_repeated_plan_gives_what_planning_each_step_does() -> None:
    controller, _ = cached()
    alone = AutoController(LIMITS, longest=16, costs=COSTS)
    assert Loop(4, 3).run(controller, 400).goodput > 0.95 * Loop(4, 3).run(alone, 400).goodput


def test_what_is_new_is_planned_anew_until_it_is_known() -> None:
    """A first plan that expects too much would else count against drafts for long: as what they gave over that."""
    controller, inner = cached()
    planned = []
    for steps in (4, 16, 60):
        Loop(1, 1).run(controller, steps)
        planned.append(inner.plans)
    assert planned[0] >= 3
    assert planned[2] - planned[1] < 20


def test_a_repeated_probe_reads_no_more_of_a_long_prompt() -> None:
    limits = with_traits(ProposerTraits("draft_model", probe_context=True))
    controller, inner = cached(limits=limits)
    trace = Loop(1, 1, lambda step, r: 0.0, limits=limits, prompt=4000).run(controller, 400)
    probes = [plan for plan in trace.plans if any(plan.depth)]
    assert inner.plans < 400 - len(probes) < 400
    assert {plan.probe_context for plan in probes} == {32}


def test_a_repeated_probe_reads_no_more_though_a_request_has_come() -> None:
    limits = with_traits(ProposerTraits("draft_model", probe_context=True))
    loop = Loop(4, 1, lambda step, r: 0.0, limits=limits, prompt=4000)
    drafts = [any(plan.depth) for plan in loop.run(cached(limits=limits)[0], 400).plans]
    steps = 1 + max(step for step in range(1, 400) if drafts[step] and not drafts[step - 1])  # the first of a probe
    controller, inner = cached(limits=limits)
    loop.run(controller, steps)
    assert inner.estimates()["mode"] == "probe_draft"
    inner.holds = 1  # else none holds after three rejected drafts
    made = inner.plans
    plan = controller.plan(replace(loop.view(steps, [0, 4000, 4000, 4000]), ids=("new", "1", "2", "3")))
    assert inner.plans == made
    assert any(plan.depth)
    assert plan.probe_context == 32


def drafting(requests: int = 4) -> tuple[CachedPlan, Counted, StepView]:
    """A controller in the midst of drafting, whose plan may be repeated, and the next step's view."""
    controller, inner = cached()
    loop, steps = Loop(requests, 1), 60
    loop.run(controller, steps)
    while not inner.holds or inner.estimates()["mode"] != "speculate":
        steps += 1
        view = replace(loop.view(steps, [0] * requests))
        controller.plan(view)
        assert steps < 200
    return controller, inner, loop.view(steps + 1, [0] * requests)


def test_a_request_that_comes_gets_what_the_others_have() -> None:
    controller, inner, view = drafting()
    before, plans = controller.plan(view), inner.plans
    joined = replace(view, step=view.step + 1, ids=(*view.ids[:3], "new"))
    plan = controller.plan(joined)
    assert inner.plans == plans
    assert plan.depth[:3] == before.depth[:3]
    assert plan.depth[3] == max(before.depth)
    assert plan.stop is not None
    assert len(plan.stop.offset) == 4


def test_a_plan_is_made_anew_where_prompts_are_unread() -> None:
    controller, inner, view = drafting()
    plans = inner.plans
    controller.plan(replace(view, ids=("a", "b", "c", "d"), lag=((500,) * 4,)))
    assert inner.plans == plans + 1


def test_a_request_near_its_end_shortens_its_own_draft_alone() -> None:
    controller, _, view = drafting()
    before = controller.plan(view).depth
    ending = replace(view, step=view.step + 1, room_depth=(1, *view.room_depth[1:]))
    assert controller.plan(ending).depth == (min(1, before[0]), *before[1:])
    assert controller.plan(replace(view, step=view.step + 2)).depth == before


def test_hosts_are_asked_for_no_more_than_the_next_plan_uses() -> None:
    controller, inner, view = drafting()
    plan = controller.plan(view)
    assert plan.next_needs == ("lag" if inner.holds else "all")
    lookup = ProposerTraits("ngram", "none", has_confidence=False)
    both = replace(LIMITS, proposers=(*LIMITS.proposers, lookup))
    asked, _ = cached(limits=both)
    assert asked.plan(Loop(2, limits=both).view(0, [0, 0])).next_needs == "all"


def test_a_lookup_that_found_more_than_was_passed_over_makes_a_new_plan() -> None:
    lookup = ProposerTraits("ngram", "none", has_confidence=False)
    limits = replace(LIMITS, proposers=(*LIMITS.proposers, lookup))
    controller, inner = cached(limits=limits)
    loop = Loop(2, quality=lambda step, request: 0.0, limits=limits)
    loop.run(controller, 100)
    view = replace(loop.view(0, [0, 0]), lag=((0, 0), (0, 0)))
    for step in range(100, 400):
        plans = inner.plans
        plan = controller.plan(replace(view, step=step, offers=(None, ((1, 1), (0, 0)))))
        if inner.plans == plans and not any(plan.depth):
            break
    assert inner.plans == plans, "no plan was ever repeated"
    holds = inner.holds
    assert holds > 2
    controller.plan(replace(view, step=step + 1, offers=(None, ((1, 1), (1, 1)))))
    assert inner.plans == plans
    controller.plan(replace(view, step=step + 2, offers=(None, ((9, 8), (0, 0)))))
    assert inner.plans == plans + 1


def test_a_long_match_that_was_used_does_not_hide_shorter_ones() -> None:
    lookup = ProposerTraits("ngram", "none", has_confidence=False)
    limits = replace(LIMITS, proposers=(*LIMITS.proposers, lookup))
    controller, inner = cached(limits=limits)
    loop = Loop(1, limits=limits)
    loop.run(controller, 100)
    view = replace(loop.view(100, [0]), lag=((0,), (0,)))
    assert controller.plan(replace(view, offers=(None, ((16, 16),)))).proposer == (1,)
    for step in range(101, 400):
        plans = inner.plans
        controller.plan(replace(view, step=step, offers=(None, ((0, 0),))))
        if inner.plans == plans and inner.holds > 1:
            break
    assert inner.plans == plans, "no plan was ever repeated"
    plan = controller.plan(replace(view, step=step + 1, offers=(None, ((8, 16),))))
    assert inner.plans == plans + 1
    assert plan.proposer == (1,)


def test_a_repeated_plan_expects_what_its_own_step_computes() -> None:
    """A plan that was made beside a prompt is not slow without it: plain decoding would look fast ever after."""
    controller, inner, view = drafting()
    controller.plan(view)
    assert inner.latest is not None
    before = inner.latest.expected.seconds
    assert inner.estimates()["expected_step_s"] == before
    controller.plan(replace(view, step=view.step + 1, prefill_tokens=200))
    beside = inner.estimates()["expected_step_s"]
    controller.plan(replace(view, step=view.step + 2))
    after = inner.latest.expected.seconds
    assert beside > 2 * before
    assert abs(after / before - 1.0) < 0.01


class Timed(CachedPlan):
    """On a processor on which making a plan takes ``plan_s``, and repeating one next to nothing."""

    def __init__(self, inner: Counted, plan_s: float) -> None:
        super().__init__(inner, LIMITS)
        self.counted, self.plan_s, self.before = inner, plan_s, 0

    def observe(self, outcome: StepOutcome) -> None:
        made, self.before = self.counted.plans > self.before, self.counted.plans
        super().observe(replace(outcome, plan_s=self.plan_s if made else 1e-6))


def test_dear_plans_are_repeated_for_longer() -> None:
    made, slow = {}, replace(SMALL_PAIR, rows=tuple((n, 10 * s) for n, s in SMALL_PAIR.rows))
    for plan_s in (1e-4, 5e-4, 5e-3):
        _, inner = cached(slow)
        Loop(8, quality=lambda step, request: 0.0, machine=slow).run(Timed(inner, plan_s), 600)
        made[plan_s] = inner.plans
    assert made[5e-3] < 0.8 * made[5e-4]
    assert made[5e-4] < 0.5 * made[1e-4]
