"""``auto`` in a closed loop of known acceptance and cost, against what could be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import Controller, DraftView, Limits, ProposerTraits, StepOutcome
from dynaspec.control.auto import AutoController
from dynaspec.control.planner import ChainPlanner
from dynaspec.control.policies.lengths import Constant, LengthController
from dynaspec.control.policies.wrappers import PlainController
from dynaspec.simulate.costs import CurveCosts
from dynaspec.simulate.simulator import simulate
from dynaspec.simulate.traces import Lengths, Synthetic, closed_loop
from support.closed_loop import COSTS, LIMITS, LONGEST, Loop


def auto(limits: Limits = LIMITS, costs: PassCosts = COSTS) -> AutoController:
    return AutoController(limits, longest=LONGEST, costs=costs)


def fixed(k: int) -> Controller:
    return LengthController(Constant(k), ChainPlanner(LIMITS)) if k else PlainController()


SEEDS = (1, 2, 3, 4)


def best_fixed(requests: int, quality: float, steps: int) -> float:
    loop = Loop(requests, 9, lambda step, r: quality, noise=0.0)
    return max(loop.run(fixed(k), steps).goodput for k in range(6))


@pytest.mark.parametrize("quality", [1.0, 0.6, 0.2])
@pytest.mark.parametrize("requests", [1, 4, 16])
def test_comes_close_to_the_best_fixed_length_at_any_load(requests: int, quality: float) -> None:
    steps = 600 if requests < 16 else 300
    goodput = np.mean([Loop(requests, seed, lambda step, r: quality).run(auto(), steps).goodput for seed in (1, 2)])
    assert goodput >= 0.96 * best_fixed(requests, quality, steps)


def test_beats_every_fixed_length_where_confidence_tells_something() -> None:
    goodput = np.mean([Loop(1, seed).run(auto(), 800).goodput for seed in (1, 2, 3)])
    assert goodput > 1.02 * best_fixed(1, 1.0, 1600)


def test_learns_the_cost_of_a_host_that_measured_nothing() -> None:
    goodput = Loop(1, 1).run(auto(costs=PassCosts()), 800).goodput
    assert goodput > 0.95 * best_fixed(1, 1.0, 1600)


def test_requests_that_are_hard_to_draft_for_get_less_than_others() -> None:
    row_s = 0.1e-3  # else the target's rows up to eight are next to free, and all get one
    costs = replace(COSTS, target=tuple((rows, seconds + row_s * rows) for rows, seconds in COSTS.target))
    traces = [
        Loop(2, seed, lambda step, r: (1.0, 0.0)[r], row_s=row_s).run(auto(costs=costs), 400) for seed in range(20)
    ]  # of four the ratio is anything from 1.1 to 2
    easy, hard = np.array([plan.depth for trace in traces for plan in trace.plans[100:]]).mean(axis=0)
    assert easy > 1.35 * hard
    assert easy > 0.4


def test_the_same_views_and_outcomes_give_the_same_plans() -> None:
    first, second = (Loop(4, 5).run(auto(), 100) for _ in range(2))
    assert first.plans == second.plans


def test_hosts_that_cannot_stop_trim_or_be_ragged_are_served() -> None:
    plain = Loop(4, 1, noise=0.0).run(PlainController(), 300).goodput
    for change in ({"can_stop": False}, {"can_trim": False}, {"ragged": False}, {"draft_lens": (0, 2, 5)}):
        limits = replace(LIMITS, **change)  # type: ignore[arg-type]
        trace = Loop(4, 1, limits=limits).run(auto(limits), 300)
        assert trace.goodput > plain
        assert {depth for plan in trace.plans for depth in plan.depth} <= set(limits.draft_lens)
        if not limits.ragged:
            assert all(len(set(plan.depth)) == 1 for plan in trace.plans)
        if not limits.can_stop:
            assert all(plan.stop is None for plan in trace.plans)


def test_nobody_is_granted_more_than_the_proposer_drafts() -> None:
    traits = ProposerTraits("heads", passes_per_draft="one", longest=2)
    limits = replace(LIMITS, proposers=(traits, ProposerTraits("ngram", passes_per_draft="none", has_confidence=False)))
    trace = Loop(3, 1, limits=limits).run(auto(limits), 200)
    assert max(depth for plan in trace.plans for depth in plan.depth) == 2


def test_ended_requests_leave_nothing_behind() -> None:
    controller = auto()
    Loop(4, 1).run(controller, 20)
    controller.forget(["0", "1", "2", "3", "never seen"])
    Loop(4, 2).run(controller, 20)
    assert sorted(controller._slots.of(("0", "1", "2", "3")).tolist()) == [0, 1, 2, 3]


def test_says_what_it_believes_in_plain_values() -> None:
    import json

    controller = auto()
    json.dumps(dict(controller.estimates()))
    Loop(2, 1).run(controller, 50)
    found = json.loads(json.dumps(dict(controller.estimates())))
    assert found["mode"] in ("plain", "speculate", "probe_plain", "probe_draft")
    assert 0 < found["expected_step_s"] < 0.1
    assert found["token_price_s"] == pytest.approx(1 / max(found["plain_goodput"], found["draft_goodput"]), rel=0.1)
    assert found["draft_goodput"] > found["plain_goodput"] > 0
    assert 0.5 < found["proposers"]["draft_model"]["acceptance"][0] < 0.95


def test_without_a_proposer_everything_is_plain() -> None:
    limits = Limits(draft_lens=(0,), proposers=())
    assert Loop(2, 1, limits=limits).run(auto(limits), 5).mean_length(0, 5) == 0


def test_late_outcomes_are_taken_as_they_come() -> None:
    controller = auto(replace(LIMITS, plan_lag=1))
    seen = []

    class Late:
        def plan(self, view):  # type: ignore[no-untyped-def]
            return controller.plan(view)

        def trim(self, view, plan, drafts):  # type: ignore[no-untyped-def]
            return controller.trim(view, plan, drafts)

        def observe(self, outcome):  # type: ignore[no-untyped-def]
            seen.append(outcome)
            if len(seen) > 1:
                controller.observe(seen.pop(0))

        def forget(self, ids):  # type: ignore[no-untyped-def]
            controller.forget(ids)

    assert Loop(1, 1).run(Late(), 600).goodput > 0.95 * best_fixed(1, 1.0, 1200)


def test_lookups_are_verified_as_far_as_their_matches_are_worth() -> None:
    limits = Limits(draft_lens=tuple(range(17)), proposers=(ProposerTraits("ngram", "none", has_confidence=False),))
    controller = AutoController(limits, longest=16, costs=PassCosts(target=COSTS.target, drafters=((),)))
    view = replace(Loop(2, limits=limits).view(0, [0, 0]), offers=(((5, 16), (0, 0)),))
    plan = controller.plan(view)
    assert plan.depth[0] > 0
    assert plan.depth[1] == 0


def test_a_step_is_trimmed_by_its_own_requests_though_the_next_is_planned_already() -> None:
    limits = replace(LIMITS, plan_lag=1)
    controller = AutoController(limits, longest=LONGEST, costs=COSTS)
    few, many = Loop(1, limits=limits).view(0, [0]), Loop(6, limits=limits).view(1, [0] * 6)
    for first, second in ((many, few), (few, replace(many, step=2))):
        plan = controller.plan(first)
        controller.plan(replace(second, step=first.step + 7))
        lens = tuple(min(depth, 3) for depth in plan.depth)
        confidence = tuple((0.9, 0.5, 0.1)[:n] for n in lens)
        trimmed = controller.trim(first, plan, DraftView(lens, confidence))
        assert len(trimmed.depth) == len(first.ids)
        assert all(cut <= n for cut, n in zip(trimmed.depth, lens, strict=True))


def test_a_probe_is_verified_as_it_was_drafted() -> None:
    """It is there to see what is accepted: trimmed, it would teach what its own signals say."""
    controller = auto()
    view = Loop(6).view(0, [0] * 6)
    plan = controller.plan(view)
    assert controller.estimates()["mode"] == "probe_draft"
    drafts = DraftView(plan.depth, tuple((0.02,) * depth for depth in plan.depth))
    assert controller.trim(view, plan, drafts).depth == plan.depth


@pytest.mark.parametrize(("lag", "context"), [(0, 0), (100, 0), (4000, 32)])
def test_a_probe_reads_the_latest_tokens_alone_where_all_would_be_dear(lag: int, context: int) -> None:
    limits = replace(LIMITS, proposers=(replace(LIMITS.proposers[0], probe_context=True),))
    controller, view = auto(limits), replace(Loop(1, limits=limits).view(0, [0]), lag=((lag,),))
    found = set()
    for step in range(0, 3000, 100):  # one that reads much waits until as much has been saved up
        plan = controller.plan(replace(view, step=step))
        if controller.estimates()["mode"] == "probe_draft":
            found.add(plan.probe_context)
    assert found == {context}


def test_a_server_that_takes_prompts_in_all_the_time_finds_what_pays() -> None:
    """Sixty-four requests of 32 tokens: nearly every step computes a prompt beside the decoding rows."""
    costs = PassCosts(target=((1, 0.02), (256, 0.022), (2048, 0.04)), drafters=(((1, 1e-3), (256, 2e-3)),))
    trace = Synthetic(requests=1000, output=Lengths(32)).draw(np.random.default_rng(1))

    def goodput(make: Callable[[Limits], Controller]) -> float:
        run = simulate(trace, closed_loop(1000, 64), CurveCosts(costs), make)
        return float(run.output.sum()) / run.seconds

    drafting = goodput(lambda limits: LengthController(Constant(4), ChainPlanner(limits)))
    assert drafting > 1.2 * goodput(lambda limits: PlainController())
    assert goodput(lambda limits: auto(limits, costs)) > 0.93 * drafting


class Refused(AutoController):
    """Is told of every rejection that a grammar refused the token."""

    def observe(self, outcome: StepOutcome) -> None:
        super().observe(replace(outcome, ended=tuple("invalid" if e == "rejected" else e for e in outcome.ended)))


def test_a_token_that_a_grammar_refused_was_rejected() -> None:
    refused = Loop(4, 5).run(Refused(LIMITS, longest=LONGEST, costs=COSTS), 200)
    assert refused.goodput == Loop(4, 5).run(auto(), 200).goodput
