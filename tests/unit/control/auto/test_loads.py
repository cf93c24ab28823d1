"""At which numbers of requests it has been seen what drafting takes, and what follows from that."""

from __future__ import annotations

import math

import pytest

from dynaspec.contract.step import SpecPlan, StepView
from dynaspec.control.auto import AutoController
from dynaspec.control.auto.guard import PlainGuard
from dynaspec.control.auto.loads import Loads
from support.closed_loop import COSTS, LIMITS, LONGEST, Loop

LASTS = 8
"""Steps after which fewer requests are another load."""


def come(loads: Loads, load: int) -> bool:
    """Another number of requests comes to stay; returns whether that made another load."""
    return [loads.meet(load, 1) for _ in range(LASTS + 1)][-1]


def see(loads: Loads, load: int, steps: int) -> None:
    """So many steps of drafting, after some without."""
    come(loads, load)
    loads.drafted(steps)


def test_the_first_load_is_no_other_one_and_nothing_strange() -> None:
    loads = Loads()
    assert not loads.meet(4, 1)
    assert not loads.strange


def test_about_as_many_requests_are_the_same_load() -> None:
    loads = Loads()
    loads.meet(8, 1)
    assert [come(loads, load) for load in (9, 12, 6, 8)] == [False] * 4
    assert [loads.meet(load, 1) for load in (13, 20)] == [True] * 2
    assert [come(loads, load) for load in (13, 8)] == [True] * 2


def test_fewer_requests_for_some_steps_are_no_other_load() -> None:
    """Between the end of some and the start of those that follow."""
    loads = Loads()
    loads.meet(4, 1)
    for _ in range(20):
        assert not any(loads.meet(load, 1) for load in (2, 1, 1, 2, 2, 4))
    assert [loads.meet(2, 1) for _ in range(LASTS + 1)] == [False] * LASTS + [True]
    assert not any(loads.meet(2, 1) for _ in range(20))


def test_it_is_known_when_to_look_whether_the_load_has_changed() -> None:
    loads = Loads()
    loads.meet(4, 1)
    assert loads.unsure_for == math.inf
    loads.meet(1, 100)
    assert loads.unsure_for == LASTS
    assert not loads.meet(1, 3)
    assert loads.unsure_for == LASTS - 3
    assert loads.meet(1, LASTS - 3)
    assert loads.unsure_for == math.inf


def test_more_requests_are_another_load_at_once() -> None:
    loads = Loads()
    loads.meet(4, 1)
    assert loads.meet(16, 1)
    assert not loads.meet(16, 1)


def test_a_load_is_strange_until_drafting_has_been_seen_there_for_some_steps() -> None:
    loads = Loads()
    see(loads, 1, 100)
    come(loads, 4)
    for _ in range(15):
        loads.drafted(1)
        assert loads.strange
    loads.drafted(1)
    assert not loads.strange
    for load in (1, 4, 1):  # both are known
        come(loads, load)
        assert not loads.strange
    loads.meet(1, 20_000)
    come(loads, 4)
    assert loads.strange  # long ago


def modes(guard: PlainGuard, advantage: float, load: int, steps: int) -> str:
    """The first letters of the modes decided on."""
    return "".join(guard.decide(advantage, advantage, 1.0, load)[0] for _ in range(steps))


@pytest.mark.parametrize(("advantage", "goes_on"), [(0.9, 16), (0.8, 0)])
def test_where_it_has_not_been_seen_what_drafting_takes_it_goes_on_if_it_nearly_pays(
    advantage: float, goes_on: int
) -> None:
    guard = PlainGuard(only_by_trial=True)
    assert modes(guard, 1.5, 2, 40) == "s" * 40
    assert modes(guard, advantage, 4, 40).startswith("s" * goes_on + "p")


def test_plain_decoding_under_a_strange_load_looks_at_drafting_too() -> None:
    guard = PlainGuard(only_by_trial=True)
    modes(guard, 0.5, 16, 60)
    assert modes(guard, 0.9, 4, 40).startswith("p" * LASTS + "s" * (16 - LASTS) + "p")
    modes(guard, 0.5, 16, 60)
    assert "s" not in modes(guard, 0.9, 4, 40)  # it has been seen


def test_decoding_goes_on_as_before_while_it_is_not_sure_that_the_load_has_changed() -> None:
    guard = PlainGuard(only_by_trial=True)
    assert modes(guard, 1.5, 4, 40) == "s" * 40
    for _ in range(20):
        modes(guard, 0.9, 2, 3)
        assert guard.speculating
        modes(guard, 1.5, 4, 3)


def test_what_would_nearly_pay_is_for_the_guard_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    promised: list[float] = []

    def watch(controller: AutoController) -> None:
        plan = controller.plan

        def watched(view: StepView) -> SpecPlan:
            made, found = plan(view), controller.estimates()
            if found["mode"] == "plain":
                promised.append(found["speculation_goodput"] / found["plain_goodput"])
            return made

        monkeypatch.setattr(controller, "plan", watched)

    for seed in range(6):
        watch(controller := AutoController(LIMITS, longest=LONGEST, costs=COSTS))
        Loop(5, seed, lambda step, r: 0.3).run(controller, 300)
    assert len(promised) > 6 * 250
    assert sum(0.8 < promise < 1.0 for promise in promised) > 0.5 * len(promised)


@pytest.mark.parametrize(("requests", "quality"), [(4, 0.45), (8, 0.55), (12, 0.55)])
def test_what_nearly_pays_is_promised_at_its_best(requests: int, quality: float) -> None:
    """Not at the length that would pay best if tokens were worth more, which is too long."""
    controller = AutoController(LIMITS, longest=LONGEST, costs=COSTS)
    Loop(requests, 1, lambda step, r: quality).run(controller, 400)
    found, costs, size = controller.estimates(), controller._costs, float(requests)
    chances = [*found["proposers"]["draft_model"]["acceptance"], *(0.0,) * LONGEST]
    price = found["proposers"]["draft_model"]["cost"]

    def goodput(k: int) -> float:
        emitted = requests * (1.0 + sum(math.prod(chances[: j + 1]) for j in range(k)))
        drafting_s = price["call_s"] + price["reload_s"] + k * (price["pass_s"] + requests * price["row_s"])
        target_s = costs.pass_s(size * (k + 1), 200.0 * size * (k + 1), 200.0 * size)
        return emitted / (drafting_s + target_s + controller._learner.host_s(drafts=True))

    best = max(map(goodput, range(1, 7)))
    assert found["mode"] == "plain"
    assert best < found["plain_goodput"]
    assert found["speculation_goodput"] > 0.96 * best
