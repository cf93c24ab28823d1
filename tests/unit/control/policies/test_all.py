"""What every policy must keep to, on any host and with any requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.step import Controller, DraftView, Limits, SpecPlan, StepOutcome, StepView
from unit.control.seam import (
    FIFTY_CASES,
    POLICY_KEYS,
    accepted,
    controller,
    draft_views,
    hosts,
    limits,
    outcome,
    outcomes,
    rejected,
    view,
    views,
)

HERE = {"num_speculative_tokens": 4}
"""Unless a configuration needs another: the longest that any host runs surely."""


def check_plan(seen: StepView, plan: SpecPlan, host: Limits) -> None:
    assert plan.step == seen.step
    assert len(plan.depth) == len(plan.nodes) == len(plan.proposer) == len(seen.ids)
    assert plan.nodes == plan.depth
    for depth, room, limit in zip(plan.depth, seen.room_depth, seen.max_draft, strict=True):
        assert depth in host.draft_lens
        assert depth <= room
        assert limit is None or depth <= limit
    if not host.ragged:
        assert len(set(plan.depth)) <= 1
    late = plan.stop and host.can_trim and host.ragged
    if host.verify_budget is not None and any(plan.depth) and not late:
        assert sum(plan.depth) + len(seen.ids) + seen.prefill_tokens <= host.verify_budget
    if plan.stop is not None:
        assert len(plan.stop.below) >= max(plan.depth)


def check_trim(seen: StepView, before: SpecPlan, after: SpecPlan, drafts: DraftView, host: Limits) -> None:
    assert all(a <= d for a, d in zip(after.depth, drafts.length, strict=True))
    if host.verify_budget is not None and any(after.depth):
        assert sum(after.depth) + len(seen.ids) + seen.prefill_tokens <= host.verify_budget
    if host.verify_budget is None or not (host.can_trim and host.ragged):
        assert after.depth == drafts.length
    assert (after.step, after.proposer, after.stop) == (before.step, before.proposer, before.stop)
    assert after.gate_kv_below == before.gate_kv_below


class Run:
    """Drives a controller as a host does and keeps what it saw, so that it can be driven again."""

    def __init__(self, made: Controller, lag: int) -> None:
        self.made, self.lag = made, lag
        self.plans: list[tuple[StepView, SpecPlan, DraftView, SpecPlan]] = []
        self.late: list[StepOutcome] = []
        self.events: list[tuple[str, object]] = []

    def learn(self, result: StepOutcome) -> None:
        self.late.append(result)
        if len(self.late) > self.lag:
            self.events.append(("observe", self.late[0]))
            self.made.observe(self.late.pop(0))

    def forget(self, ids: list[str]) -> None:
        self.events.append(("forget", ids))
        self.made.forget(ids)


@pytest.mark.parametrize("keys", POLICY_KEYS, ids=str)
@FIFTY_CASES
@given(data=st.data())
def test_plans_keep_to_every_limit_and_replay_to_the_same(keys: dict, data: st.DataObject) -> None:
    host = data.draw(hosts())
    run = Run(controller(host, **HERE | keys), host.plan_lag)
    for step in range(data.draw(st.integers(1, 5))):
        seen = data.draw(views(host, step))
        plan = run.made.plan(seen)
        check_plan(seen, plan, host)
        drafts = data.draw(draft_views(plan))
        trimmed = run.made.trim(seen, plan, drafts)
        check_trim(seen, plan, trimmed, drafts, host)
        run.plans.append((seen, plan, drafts, trimmed))
        run.events.append(("plan", len(run.plans) - 1))
        run.learn(data.draw(outcomes(seen, trimmed, drafts)))
        run.forget(data.draw(st.lists(st.sampled_from("abcdefghz"), max_size=3)))
    replay(run, controller(host, **HERE | keys))


def replay(run: Run, fresh: Controller) -> None:
    for kind, value in run.events:
        if kind == "plan":
            seen, plan, drafts, trimmed = run.plans[value]
            assert fresh.plan(seen) == plan
            assert fresh.trim(seen, plan, drafts) == trimmed
        elif kind == "observe":
            fresh.observe(value)
        else:
            fresh.forget(value)


@pytest.mark.parametrize("keys", POLICY_KEYS, ids=str)
def test_unknown_and_forgotten_requests_are_ignored(keys: dict) -> None:
    host = limits()
    made = controller(host, **HERE | keys)
    made.observe(outcome(0, z=rejected(5), y=accepted(7)))
    made.forget(["z", "never"])
    first = made.plan(view("a", host))
    made.forget(["a"])
    made.observe(outcome(0, a=rejected(4)))
    assert made.plan(view("a", host)) == first


@pytest.mark.parametrize("keys", POLICY_KEYS, ids=str)
def test_an_empty_step_gives_an_empty_plan(keys: dict) -> None:
    host = limits(ragged=False, verify_budget=4)
    made = controller(host, **keys)
    seen = view("", host)
    plan = made.plan(seen)
    assert plan.depth == ()
    assert made.trim(seen, plan, DraftView(length=(), confidence=())).depth == ()


@pytest.mark.parametrize("keys", POLICY_KEYS, ids=str)
def test_a_request_without_speculation_is_decoded_plainly_beside_others(keys: dict) -> None:
    host = limits()
    plan = controller(host, **keys).plan(view("ab", host, max_draft=(0, None)))
    assert plan.depth[0] == 0
    assert plan.depth[1] > 0


@FIFTY_CASES
@given(data=st.data())
def test_a_cut_does_not_depend_on_the_requests_own_tokens_behind_it(data: st.DataObject) -> None:
    host = limits(verify_budget=data.draw(st.integers(4, 24)))
    made = controller(host, num_speculative_tokens=8, draft_confidence_threshold=0.5)
    seen = view("abcd", host, step=data.draw(st.integers(0, 9)))
    plan = made.plan(seen)
    drafts = data.draw(draft_views(plan))
    cut = made.trim(seen, plan, drafts).depth
    who = data.draw(st.integers(0, 3))
    if cut[who] == drafts.length[who]:
        return
    # Some other continuation behind the cut: at least the token that the cut left out.
    other = list(drafts.length)
    other[who] = data.draw(st.integers(cut[who] + 1, plan.depth[who]))
    changed = made.trim(seen, plan, DraftView(length=tuple(other), confidence=((),) * 4)).depth
    assert changed == cut
