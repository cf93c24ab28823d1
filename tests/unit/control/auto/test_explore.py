"""Drafting or plain decoding: the better one is played, the other is probed, and what that may cost is bounded."""

from __future__ import annotations

import pytest

from dynaspec.control.auto.explore import PLAIN, Choice, Explorer, Prediction
from dynaspec.control.estimate.settings import AutoSettings

DRAFT = 1
USUAL = Prediction(1.0, 1.0)


class World:
    """Steps of one request; drafting is predicted to give ``predicted`` and gives ``real`` times plain decoding."""

    def __init__(self, predicted: float, real: float, *, runs_model: bool = True, **settings: float) -> None:
        self.settings = AutoSettings(**settings)  # type: ignore[arg-type]
        self.explorer = Explorer([runs_model], self.settings)
        self.predicted, self.real = predicted, real
        self.lost, self.played = 0.0, []

    def step(self, steps: int = 1) -> Choice:
        self.explorer.meet(1)
        plans = {PLAIN: USUAL, DRAFT: Prediction(self.predicted, 1.0)}
        choice = self.explorer.choose(plans, steps, plans.__getitem__)
        tokens = self.real if choice.arm == DRAFT else 1.0
        self.explorer.ran(choice.arm)
        self.explorer.observe(choice, choice.arm, 1, plans[choice.arm], tokens, 1.0)
        self.lost += max(1.0, self.real) - tokens
        self.played.append(choice.arm)
        return choice


BELIEVED = pytest.param(
    1.5, marks=pytest.mark.xfail(reason="27.0 steps, 25.6 are allowed: it leads while it is believed to be faster")
)


@pytest.mark.parametrize("predicted", [0.5, 0.95, BELIEVED])
def test_probes_of_what_never_pays_cost_what_they_may(predicted: float) -> None:
    world = World(predicted, 0.5)
    for _ in range(2000):
        world.step()
        if predicted > 1.0:  # the estimators learn, too
            world.predicted = max(0.5, world.predicted - 0.05)
    allowed = world.settings.loss_budget * (world.settings.memory + 2000)
    assert world.lost <= allowed + world.settings.probe * 0.5 + 1.0
    assert world.played.count(DRAFT) > 10


def test_what_was_believed_to_be_better_costs_no_more_than_while_that_was_believed() -> None:
    world, believed = World(1.5, 0.5), 0
    for _ in range(40):
        believed += world.predicted > 1.0
        world.step()
        world.predicted = max(0.5, world.predicted - 0.05)
    allowed = world.settings.loss_budget * (world.settings.memory + 40)
    assert world.lost <= allowed + (world.settings.probe + believed) * 0.5


def test_what_is_better_is_played_once_it_has_been_seen() -> None:
    world = World(1.5, 1.5)
    for _ in range(60):
        world.step()
    assert world.played[-40:].count(DRAFT) >= 38


def test_what_is_believed_to_be_better_is_played_though_its_first_probe_was_dear() -> None:
    """As the first steps of drafting may be slow; what was lost with them says nothing of those to come."""
    world = World(1.5, 1.5)
    world.explorer.budget[DRAFT] = -5.0
    for _ in range(20):
        world.step()
    assert world.played[-10:] == [DRAFT] * 10


def test_what_is_watched_is_played_when_it_is_better_and_never_probed() -> None:
    world = World(0.9, 0.9)
    world.explorer.watched = {DRAFT}
    for _ in range(600):
        world.step()
    assert DRAFT not in world.played
    world.predicted = world.real = 1.5  # as the estimators have learnt without a probe
    for _ in range(40):
        world.step()
    assert world.played[-30:] == [DRAFT] * 30


def test_measured_steps_outweigh_predictions() -> None:
    world = World(1.2, 0.7)
    for _ in range(600):
        world.step()
    assert world.played[-200:].count(PLAIN) > 150


def test_a_small_advantage_has_to_last_before_the_mode_changes() -> None:
    world = World(1.5, 1.5)
    for _ in range(60):
        world.step()
    world.explorer.change_steps = 1.0
    world.predicted = world.real = 0.9
    choices = [world.step() for _ in range(60)]
    late = next(n for n, choice in enumerate(choices) if choice.arm == PLAIN and not choice.probe)
    assert 1 < late < 60


def test_lookups_change_nothing_in_the_caches_and_may_come_and_go() -> None:
    world = World(2.0, 2.0, runs_model=False)
    assert world.step().arm == DRAFT
    world.predicted = world.real = 0.5
    choice = world.step()
    assert choice.arm == PLAIN or choice.probe


def test_what_led_before_a_lookup_goes_on_after_it() -> None:
    explorer = Explorer([True, False], AutoSettings())
    model, lookup = 1, 2
    plans = {PLAIN: USUAL, model: Prediction(1.5, 1.0)}
    played = []
    for step in range(60):
        if step == 40:
            explorer.change_steps, explorer.budget[model] = 2.0, 0.0  # it is no probe that goes on
        offered = plans | ({lookup: Prediction(9.0, 1.0)} if step in (40, 41) else {})
        choice = explorer.choose(offered, 1, offered.__getitem__)
        explorer.ran(choice.arm)
        explorer.observe(choice, choice.arm, 1, offered[choice.arm], offered[choice.arm].tokens, 1.0)
        played.append(choice.arm)
    assert played[38:45] == [model, model, lookup, lookup, model, model, model]


def test_says_in_how_many_steps_another_arm_takes_over() -> None:
    world = World(1.5, 1.5)
    for _ in range(60):
        world.step()
    world.explorer.change_steps, world.predicted, world.real = 0.9, 0.8, 0.8
    world.explorer.budget[DRAFT] = 0.0  # no probe follows
    assert world.step().arm == DRAFT
    assert world.explorer.quiet == 2  # a plain step gains a quarter, and the change costs 0.9
    assert [world.step().arm for _ in range(3)] == [DRAFT, DRAFT, PLAIN]


def test_a_new_load_starts_from_its_neighbour() -> None:
    world = World(1.0, 2.0)
    for _ in range(300):
        world.step()
    known = world.explorer.ratio(DRAFT)
    world.explorer.meet(4)
    assert world.explorer.ratio(DRAFT) == pytest.approx(known)
    assert known > 1.2


def test_steps_without_a_choice_still_save_for_the_next_probe() -> None:
    world = World(0.5, 0.5)
    for _ in range(40):
        world.step()
    before = world.explorer.budget[DRAFT] = 0.5
    world.step(steps=50)
    assert world.explorer.budget[DRAFT] >= before + 40 * world.settings.loss_budget


def test_says_what_the_last_probe_cost() -> None:
    world = World(0.5, 0.5)
    for _ in range(100):
        world.step()
    found = world.explorer.document()
    assert found["last_probe"]["mode"] == "draft"
    assert found["last_probe"]["cost_steps"] > 0
    assert found["last_probe"]["steps"] >= 1
