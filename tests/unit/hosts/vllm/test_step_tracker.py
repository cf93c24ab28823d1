"""A controller put in charge of vLLM's draft lengths: whose outcome is told when, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from dynaspec.contract.step import DraftView, Ended, SpecPlan, StepOutcome, StepView, Work
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from dynaspec.hosts.vllm.settings import drafter_of, limits_for
from dynaspec.hosts.vllm.step_tracker import Draft, Row, StepTracker, Verified, how_ended
from support.vllm_machine import Machine, Prices, Request


class Scripted:
    """Plans what it is told, and notes what it is asked and told."""

    def __init__(self, *depths: Sequence[int], trims_to: int = 64) -> None:
        self.depths = list(depths)
        self.trims_to = trims_to
        self.views: list[StepView] = []
        self.drafts: list[DraftView] = []
        self.outcomes: list[StepOutcome] = []
        self.forgotten: list[str] = []

    def plan(self, view: StepView) -> SpecPlan:
        self.views.append(view)
        depth = tuple(map(min, self.depths[len(self.views) - 1], view.room_depth))
        return SpecPlan(view.step, depth, (0,) * len(depth), depth)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        self.drafts.append(drafts)
        return plan.with_depth(tuple(min(*pair, self.trims_to) for pair in zip(plan.depth, drafts.length, strict=True)))

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        self.forgotten += ids


def row(name: str, drafts: int = 0, *, computed: int = 20, room: int = 50, **other: object) -> Row:
    values: dict[str, object] = {
        "id": name,
        "rows": 1 + drafts,
        "drafts": drafts,
        "computed": computed,
        "decoding": True,
        "goes_on": True,
        "length": computed + 2,
        "room": room,
        "space": 50,
    }
    return Row(**{**values, **other})  # type: ignore[arg-type]  # of many types


def prefill(name: str, rows: int, *, ends: bool = True) -> Row:
    return row(name, rows=rows, computed=0, decoding=False, goes_on=ends, length=rows + 1)


def tracker(
    controller: Scripted,
    method: str = "draft_model",
    *,
    asynchronous: bool = False,
    ranks: bool = False,
    alike: bool = False,
) -> StepTracker:
    drafter = drafter_of(method, alike=ranks)
    limits = limits_for(drafter, range(9), asynchronous=asynchronous, alike=alike)
    return StepTracker(controller, drafter, limits, alike=alike)


# --- what a plan is about -----------------------------------------------------------------------------------------


def test_the_view_has_the_requests_that_the_step_drafts_for() -> None:
    controller = Scripted((3, 2))
    step = tracker(controller).schedule([row("a"), prefill("b", 12), prefill("c", 40, ends=False)], 5, 0.0)
    view = controller.views[0]
    assert view.ids == ("a", "b")
    assert view.context_len == (22, 13)
    assert (view.prefill_tokens, view.waiting, view.room_depth) == (40, 5, (50, 50))
    assert view.limits.draft_lens == tuple(range(9))
    assert (view.limits.ragged, view.limits.can_stop, view.limits.can_gate) == (True, False, False)
    assert step.k == 3
    assert dict(step.depths) == {"a": 3, "b": 2}


def test_a_request_s_own_wish_and_room_reach_the_controller() -> None:
    controller = Scripted((4, 4))
    step = tracker(controller).schedule([row("a", room=-1, max_draft=2), row("b", temperature=0.7)], 0, 0.0)
    assert controller.views[0].room_depth == (0, 50)
    assert controller.views[0].max_draft == (2, None)
    assert controller.views[0].temperature == (0.0, 0.7)
    assert step.k == 4


def test_without_anybody_to_draft_for_nothing_is_asked() -> None:
    controller = Scripted()
    step = tracker(controller).schedule([prefill("a", 8, ends=False)], 0, 0.0)
    assert (step.k, step.plan, controller.views) == (0, None, [])


@pytest.mark.parametrize("method", ["suffix", "medusa", "ngram_gpu"])
def test_methods_of_one_length_draft_that_in_every_step(method: str) -> None:
    step = tracker(Scripted((2, 0)), method).schedule([row("a"), row("b")], 0, 0.0)
    assert step.k == 8
    assert dict(step.depths) == {"a": 2, "b": 0}


def test_ranks_that_must_draft_alike_do() -> None:
    assert tracker(Scripted((1,)), ranks=True).schedule([row("a")], 0, 0.0).k == 8


def test_requests_that_are_to_be_alike_verify_what_is_drafted_for_one() -> None:
    controller = Scripted((3, 1, 0, 2, 0))
    rows = [row("a"), row("b"), row("c", max_draft=1), row("d", space=2), row("e", room=0)]
    host = tracker(controller, alike=True)
    step = host.schedule(rows, 0, 0.0)
    assert step.k == 3
    assert dict(step.depths) == {"a": 3, "b": 3, "c": 1, "d": 2, "e": 3}
    assert not controller.views[0].limits.can_trim
    kept = host.drafted(step, dict.fromkeys("abcde", 3), 1.0)
    assert kept == {"a": 3, "b": 3, "c": 1, "d": 2, "e": 3}


# --- whose outcome, and when --------------------------------------------------------------------------------------


def test_a_plan_is_told_about_after_the_step_that_verifies_it() -> None:
    controller = Scripted((3, 3), (2, 2))
    host = tracker(controller)
    first = host.schedule([prefill("a", 10), prefill("b", 10)], 0, 0.0)
    host.commit(first, {}, 1.0)
    host.drafted(first, {"a": 3, "b": 3}, 1.5)
    assert controller.outcomes == []
    second = host.schedule([row("a", 3, computed=10), row("b", 3, computed=10)], 0, 1.75)
    host.commit(second, {"a": Verified(4, 4), "b": Verified(2, 2)}, 3.0)
    assert controller.outcomes == []  # the drafter may still run
    host.drafted(second, {"a": 2, "b": 2}, 3.25)
    (outcome,) = controller.outcomes
    assert outcome.plan_step == controller.views[0].step
    assert outcome.ids == ("a", "b")
    assert (outcome.requested, outcome.drafted, outcome.verified) == ((3, 3), (3, 3), (3, 3))
    assert (outcome.accepted, outcome.emitted) == ((3, 1), (4, 2))
    assert outcome.ended == ("all_accepted", "rejected")
    assert outcome.step_s == pytest.approx(1.5)
    assert (outcome.draft_s, outcome.verify_s) == (0.0, 0.0)


def test_work_is_that_of_the_step_whose_seconds_are_told() -> None:
    controller = Scripted((3, 3), (2, 2))
    host = tracker(controller)
    host.commit(host.schedule([prefill("a", 10), prefill("b", 10)], 0, 0.0), {}, 1.0)
    second = host.schedule([row("a", 3, computed=10), row("b", 1, computed=10), prefill("c", 5, ends=False)], 0, 1.0)
    host.commit(second, {"a": Verified(1, 1), "b": Verified(1, 1)}, 2.0)
    host.schedule([], 0, 2.0)
    # a's four rows see 11 … 14 entries, b's two 11 and 12, c's five 1 … 5; then k = 2 is drafted for all three.
    seen = (11 + 12 + 13 + 14) + (11 + 12) + (1 + 2 + 3 + 4 + 5)
    assert controller.outcomes[0].work == Work(rows_per_pass=(11, 3), verify_rows=6, kv_tokens=seen, prefill_rows=5)


def test_at_length_0_a_model_runs_one_pass_and_a_lookup_none() -> None:
    model, lookup = drafter_of("draft_model"), drafter_of("ngram")
    assert [model.rows_per_pass(k, 6, 2) for k in range(4)] == [(6,), (6,), (6, 2), (6, 2, 2)]
    assert [lookup.rows_per_pass(k, 6, 2) for k in range(3)] == [(), (), ()]
    assert drafter_of("medusa").rows_per_pass(5, 6, 2) == (6,)
    assert drafter_of("draft_model", runner_v2=True).rows_per_pass(5, 6, 2) == (6,)
    assert drafter_of("eagle", runner_v2=True).rows_per_pass(3, 6, 2) == (6, 2, 2)


def test_waiting_between_steps_is_nobody_s_time() -> None:
    controller = Scripted((1,), (1,), (1,))
    host = tracker(controller)
    for started, ended in ((0.0, 1.0), (1.0, 2.0), (7.0, 9.5)):
        step = host.schedule([row("a", int(started > 0))], 0, started)
        host.commit(step, {"a": Verified(1, 1)}, ended)
        host.drafted(step, {"a": 1}, ended)
    assert [outcome.step_s for outcome in controller.outcomes] == [1.0, 2.5]


def test_overlapping_steps_take_the_time_since_the_one_before_ended() -> None:
    controller = Scripted((1,), (1,), (1,), (1,))
    host = tracker(controller, asynchronous=True)
    first = host.schedule([row("a")], 0, 0.0)
    second = host.schedule([row("a", 1)], 0, 0.1)
    host.commit(first, {"a": Verified(1, 1)}, 1.0)
    third = host.schedule([row("a", 1)], 0, 1.1)
    host.commit(second, {"a": Verified(2, 2)}, 2.0)
    host.schedule([row("a", 1)], 0, 2.1)
    assert [(o.plan_step, o.step_s) for o in controller.outcomes] == [(0, 1.0)]
    host.commit(third, {"a": Verified(1, 1)}, 3.25)
    host.schedule([], 0, 3.3)
    assert [(o.plan_step, o.step_s) for o in controller.outcomes] == [(0, 1.0), (1, 1.25)]
    assert controller.views[0].limits.plan_lag == 2
    assert not controller.views[0].limits.can_trim


def test_a_step_whose_drafter_cannot_run_teaches_nothing() -> None:
    controller = Scripted((3,), (3,), (3,))
    host = tracker(controller)
    host.commit(host.schedule([row("a")], 0, 0.0), {"a": Verified(1, 1)}, 1.0)
    step = host.schedule([row("a", 3)], 0, 1.0, drafts=False)
    assert (step.k, step.plan) == (0, None)
    host.commit(step, {"a": Verified(4, 4)}, 2.0)
    assert host.drafted(step, {"a": 8}, 2.0) == {}  # vLLM has made drafts of zeros up
    assert controller.outcomes == []
    host.commit(host.schedule([row("a")], 0, 2.0), {"a": Verified(1, 1)}, 3.0)
    host.commit(host.schedule([row("a", 3)], 0, 3.0), {"a": Verified(1, 1)}, 4.0)
    host.schedule([], 0, 4.0)
    assert [outcome.step_s for outcome in controller.outcomes] == [1.0]


# --- trimming and counting ----------------------------------------------------------------------------------------


def test_drafts_are_trimmed_once_their_lengths_are_known() -> None:
    controller = Scripted((4, 4, 2), (0, 0, 0), trims_to=3)
    host = tracker(controller, "ngram")
    step = host.schedule([row("a"), row("b"), row("c")], 0, 0.0)
    assert host.drafted(step, {"a": 4, "b": 1, "c": 4}, 1.0) == {"a": 3, "b": 1, "c": 2}
    assert controller.drafts == [DraftView(length=(4, 1, 4), confidence=((), (), ()))]
    host.commit(
        host.schedule([row("a", 3), row("b", 1), row("c", 2)], 0, 1.0),
        {"a": Verified(4, 4), "b": Verified(1, 1), "c": Verified(3, 2)},
        2.0,
    )
    host.schedule([], 0, 2.0)
    (outcome,) = controller.outcomes
    assert outcome.requested == (4, 4, 2)
    assert outcome.drafted == (4, 1, 2)
    assert outcome.verified == (3, 1, 2)
    assert outcome.accepted == (3, 0, 2)
    assert outcome.ended == ("all_accepted", "rejected", "stopped")


@pytest.mark.parametrize(
    ("draft", "tested", "accepted", "emitted", "invalid", "ended"),
    [
        (None, 0, 0, 1, 0, "none"),
        (Draft(0, 0, 0, 0, 0), 0, 0, 1, 0, "none"),
        (Draft(0, 3, 3, 3, 3), 3, 3, 4, 0, "all_accepted"),
        (Draft(0, 3, 3, 3, 3), 3, 1, 2, 0, "rejected"),
        (Draft(0, 3, 3, 3, 3), 3, 3, 2, 0, "stopped"),
        (Draft(0, 3, 3, 3, 1), 1, 1, 2, 0, "invalid"),  # a grammar cut it before it was scheduled
        (Draft(0, 3, 3, 3, 0), 0, 0, 1, 0, "invalid"),
        (Draft(0, 3, 3, 3, 3), 1, 1, 2, 2, "invalid"),  # and after
        (Draft(0, 3, 3, 3, 1), 1, 0, 1, 0, "rejected"),
        (Draft(0, 3, 3, 3, 3), 0, 0, 1, 0, "none"),  # no room for its rows
    ],
)
def test_why_a_run_ended(draft: Draft, tested: int, accepted: int, emitted: int, invalid: int, ended: Ended) -> None:
    assert how_ended(draft, tested, accepted, emitted, invalid) == ended


def test_what_a_grammar_refuses_is_not_taken_for_the_end_of_a_draft() -> None:
    controller = Scripted((3,), (0,))
    host = tracker(controller)
    step = host.schedule([row("a")], 0, 0.0)
    host.drafted(step, {"a": 3}, 1.0)
    host.checked({"a": 1, "unknown": 4})
    host.commit(host.schedule([row("a", 1)], 0, 1.0), {"a": Verified(2, 2)}, 2.0)
    host.schedule([], 0, 2.0)
    outcome = controller.outcomes[0]
    assert (outcome.drafted, outcome.verified, outcome.accepted, outcome.ended) == ((3,), (1,), (1,), ("invalid",))


def test_requests_that_left_are_left_out() -> None:
    controller = Scripted((2, 2), (2, 2))
    host = tracker(controller, asynchronous=True)
    host.commit(host.schedule([row("a"), row("b")], 0, 0.0), {}, 1.0)
    step = host.schedule([row("a", 2), row("b", 2)], 0, 1.0)
    host.forget(["b"])
    host.commit(step, {"a": Verified(3, 3)}, 2.0)
    host.schedule([], 0, 2.0)
    assert controller.outcomes[0].ids == ("a",)
    assert controller.outcomes[0].work.verify_rows == 6  # its rows were run all the same
    assert controller.forgotten == ["b"]


def test_a_preempted_request_loses_its_drafts_but_not_what_was_learnt() -> None:
    controller = Scripted((2,), (2,), (2,))
    host = tracker(controller)
    host.schedule([row("a")], 0, 0.0)
    host.forget([], ["a"])
    step = host.schedule([row("a", rows=30, computed=0, decoding=False)], 0, 1.0)
    assert step.tested == {}
    assert controller.forgotten == []


def test_totals_are_those_of_the_outcomes() -> None:
    controller = Scripted((2,), (0,))
    host = tracker(controller)
    host.commit(host.schedule([row("a")], 0, 0.0), {"a": Verified(1, 1)}, 1.0)
    host.commit(host.schedule([row("a", 2)], 0, 1.0), {"a": Verified(2, 2)}, 2.0)
    host.schedule([], 0, 2.0)
    counts = host.stats.snapshot()
    assert (counts.drafts, counts.draft_tokens, counts.accepted, counts.emitted) == (1, 2, 1, 2)


# --- every policy, and auto in particular -------------------------------------------------------------------------

POLICIES: Mapping[str, Mapping[str, object]] = {
    "auto": {},
    "constant": {},
    "heuristic": {},
    "heuristic_transient": {},
    "elastic": {"draft_length_options": (1, 3, 6)},
    "schedule": {"num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 64, 2]]},
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("method", ["draft_model", "ngram", "suffix"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_drives_every_kind_of_method(policy: str, method: str, asynchronous: bool) -> None:
    drafter = drafter_of(method)
    limits = limits_for(drafter, range(9), asynchronous=asynchronous)
    named = {"model": "drafter"} if drafter.runs_model else {}
    config = SpeculativeConfig(
        method=drafter.kind, policy=policy, num_speculative_tokens=8, **named, **POLICIES[policy]
    )
    host = StepTracker(build_controller(config, limits), drafter, limits)
    machine = Machine(host, runs_model=drafter.runs_model, asynchronous=asynchronous)
    requests = [Request(str(i), left=30 + i, chance=0.7) for i in range(4)]
    emitted = machine.run(requests, 400)
    assert emitted == sum(30 + i for i in range(4))
    assert host.stats.snapshot().accepted > 0
    if not drafter.varies:
        assert set(machine.lengths) == {8}


def learnt(chance: float, prices: Prices, *, asynchronous: bool = False, alike: bool = False) -> tuple[float, float]:
    """Mean draft length of ``auto`` once it has learnt, and its goodput over that of plain decoding."""
    drafter = drafter_of("draft_model")
    limits = limits_for(drafter, range(9), asynchronous=asynchronous, alike=alike)
    config = SpeculativeConfig(method="draft_model", model="drafter", num_speculative_tokens=8)
    host = StepTracker(build_controller(config, limits), drafter, limits, alike=alike)
    machine = Machine(host, prices, asynchronous=asynchronous)
    requests = [Request(str(i), left=1_000_000, chance=chance) for i in range(8)]
    machine.run(requests, 200)
    machine.lengths.clear()
    began = machine.now
    emitted = machine.run(requests, 300)
    plain = 8 / prices.step_s(8, 0, runs_model=True)
    return sum(machine.lengths) / len(machine.lengths), emitted / (machine.now - began) / plain


@pytest.mark.parametrize(("asynchronous", "alike"), [(False, False), (True, False), (False, True)])
def test_auto_drafts_long_where_that_pays(asynchronous: bool, alike: bool) -> None:
    length, gain = learnt(0.9, Prices(), asynchronous=asynchronous, alike=alike)
    assert length > 5
    assert gain > 2.2  # 2.4 at the best length


@pytest.mark.parametrize("asynchronous", [False, True])
def test_auto_leaves_a_drafter_that_never_hits(asynchronous: bool) -> None:
    length, gain = learnt(0.02, Prices(drafter_pass=0.004), asynchronous=asynchronous)
    assert length < 0.5
    assert gain > 0.95


def test_auto_weighs_passes_that_cost_as_much_as_the_target_s() -> None:
    cheap, _ = learnt(0.6, Prices(drafter_pass=0.0002))
    dear, gain = learnt(0.6, Prices(drafter_pass=0.010))
    assert cheap > dear
    assert gain > 1.2  # a first token costs a row only, as its pass runs anyway
