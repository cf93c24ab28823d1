"""Hosts that know a step's seconds only as a whole, and whose drafter runs its first pass in every step."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import ProposerTraits, StepOutcome, Work
from dynaspec.control.auto.columns import drafting_before, drafting_in
from dynaspec.control.auto.costs import Drafting, StepCosts
from dynaspec.control.auto.drafter import ModelDrafter, Situation, Wish
from unit.control.seam import limits, view

MODEL = ProposerTraits("model", has_confidence=False)
IDLE = ProposerTraits("model", has_confidence=False, idle_pass=True)
ONE = ProposerTraits("heads", passes_per_draft="one", has_confidence=False, idle_pass=True)
LOOKUP = ProposerTraits("lookup", passes_per_draft="none", has_confidence=False)


def outcome(*requested: int) -> StepOutcome:
    zeros, count = (0,) * len(requested), len(requested)
    return StepOutcome(
        plan_step=0,
        ids=tuple(map(str, range(count))),
        proposer=zeros,
        requested=requested,
        drafted=requested,
        verified=requested,
        accepted=zeros,
        emitted=(1,) * count,
        ended=("none",) * count,
        early_exit=(False,) * count,
        confidence=((),) * count,
    )


def learnt(fixed: float, row: float, one: float, lengths: tuple[int, ...] = (0, 1, 2, 4)) -> StepCosts:
    """From whole steps of 8 requests that draft 0, 1, 2 … tokens, some passes of which verify another length."""
    costs = StepCosts(PassCosts(), [True])
    for verified, drafted in itertools.islice(itertools.cycle(itertools.product(lengths, lengths)), 600):
        rows = 8 * (1 + verified)
        drafting = Drafting(0, drafted - 1, 8 * (drafted - 1), 0, 0.0) if drafted > 1 else None
        passes = 0 if drafting is None else drafting.passes
        costs.observe_whole(rows, 0, 0.0, fixed + row * rows + one * passes, drafting)
    return costs


@pytest.mark.parametrize(("fixed", "row", "one"), [(0.02, 2e-4, 0.004), (0.02, 2e-4, 0.02), (2e-3, 1e-4, 1e-4)])
def test_the_parts_are_learnt_from_how_whole_steps_differ(fixed: float, row: float, one: float) -> None:
    costs = learnt(fixed, row, one)
    for rows in (8, 24, 40):
        assert costs.pass_s(rows, 0, 0.0) == pytest.approx(fixed + row * rows, rel=0.05)
    # A draft's start and its rows are parts of their own; what counts is what drafts take in all.
    for passes in (1, 3):
        assert costs.draft_s(Drafting(0, passes, 8 * passes, 0, 0.0)) == pytest.approx(one * passes, rel=0.35)


def test_first_steps_are_no_measure() -> None:
    costs = StepCosts(PassCosts(), [True])
    costs.observe_whole(8, 0, 0.0, 5.0, None)
    assert costs.pass_s(8, 0, 0.0) > 1.0  # a guess without scale
    costs.observe_whole(8, 0, 0.0, 0.01, None)
    assert costs.pass_s(8, 0, 0.0) == pytest.approx(0.01, rel=0.01)
    costs.observe_whole(16, 0, 0.0, 5.0, Drafting(0, 1, 8, 0, 0.0))
    assert costs.pass_s(8, 0, 0.0) == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_steps_without_seconds_teach_nothing(seconds: float) -> None:
    costs = learnt(0.02, 2e-4, 0.004)
    before = costs.pass_s(8, 0, 0.0)
    costs.observe_whole(8, 0, 0.0, seconds, None)
    costs.observe_whole(0, 0, 0.0, 1.0, None)
    assert costs.pass_s(8, 0, 0.0) == before


@pytest.mark.parametrize(
    ("traits", "passes", "drafting"),
    [
        (MODEL, (), None),
        (MODEL, (6, 4), Drafting(0, 2, 10, 0, 0.0)),
        (IDLE, (6,), None),
        (IDLE, (6, 4, 4), Drafting(0, 2, 8, 0, 0.0)),
        (ONE, (6,), None),
        (LOOKUP, (), None),
    ],
)
def test_a_pass_that_runs_anyway_is_no_drafting(
    traits: ProposerTraits, passes: tuple[int, ...], drafting: Drafting | None
) -> None:
    assert drafting_in(Work(rows_per_pass=passes), (traits,)) == drafting
    assert drafting_in(Work(rows_per_pass=passes), (traits, LOOKUP)) == drafting  # which runs no passes
    assert drafting_in(Work(rows_per_pass=passes), (traits, traits)) is None


def test_what_a_plan_had_drafted_the_step_before() -> None:
    assert drafting_before(outcome(3, 0, 1), (IDLE,)) == Drafting(0, 2, 4, 0, 0.0)
    assert drafting_before(outcome(3, 0, 1), (MODEL,)) == Drafting(0, 3, 6, 0, 0.0)
    assert drafting_before(outcome(3, 0, 1), (MODEL, LOOKUP)) == Drafting(0, 3, 6, 0, 0.0)
    assert drafting_before(outcome(1, 1), (IDLE,)) is None
    for requested, traits in (
        ((0, 0), (IDLE,)),
        ((2,), (LOOKUP,)),
        ((2,), (ONE,)),
        ((2,), (MODEL, MODEL)),
        ((), (IDLE,)),
    ):
        assert drafting_before(outcome(*requested), traits) is None


def wish(traits: ProposerTraits, costs: StepCosts, *, started: bool = False) -> Wish:
    drafter = ModelDrafter(traits, 0, costs, (), can_stop=False)
    drafter.grow(1)
    drafter.admit(0, None)
    situation = Situation(
        places=np.zeros(1, np.int64),
        cap=np.full(1, 4),
        room=np.full(1, 50),
        context=np.full(1, 100),
        runnable=np.ones(5, np.bool_),
        value=0.010,
        optimism=0.0,
        base_rows=1.0,
    )
    return drafter.wish(view("a", limits()), replace(situation, started=started))


def test_where_the_first_pass_runs_anyway_a_first_token_is_nearly_free() -> None:
    """The pass costs what the token may bring, so that only the host whose pass runs anyway drafts."""
    measured = PassCosts(target=((1, 0.010), (8, 0.010)), drafters=(((1, 0.009), (8, 0.009)),))
    paid, free = wish(MODEL, StepCosts(measured, [True])), wish(IDLE, StepCosts(measured, [True]))
    assert (paid.depth.tolist(), paid.seconds) == ([0], 0.0)
    assert free.depth.tolist() == [1]
    assert 0.0 < free.seconds < 0.001


@pytest.mark.parametrize("traits", [MODEL, IDLE])
@pytest.mark.parametrize("pass_s", [0.0005, 0.003, 0.009])
def test_where_a_draft_has_been_started_anyway_it_is_no_shorter(traits: ProposerTraits, pass_s: float) -> None:
    """Nor cheaper. Where the first pass runs anyway, to start costs less than nothing, and does so there too."""
    measured = PassCosts(target=((1, 0.010), (8, 0.010)), drafters=(((1, pass_s), (8, pass_s)),))
    before, after = (wish(traits, StepCosts(measured, [True]), started=started) for started in (False, True))
    assert after.depth[0] >= before.depth[0]
    assert after.depth[0] > before.depth[0] or after.seconds == pytest.approx(before.seconds)
