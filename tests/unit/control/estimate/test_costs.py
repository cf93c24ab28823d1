"""What steps cost, learnt from measured ones."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dynaspec.contract.costs import Drafting, PassCosts, drafting_before, drafting_in, drafting_of
from dynaspec.contract.step import ProposerTraits, StepOutcome, Work
from dynaspec.control.estimate.costs import MeasuredStep, StepCosts, row_price_s, target_s

MODEL = ProposerTraits("model", has_confidence=False)
IDLE = ProposerTraits("model", has_confidence=False, idle_pass=True)
ONE = ProposerTraits("heads", passes_per_draft="one", has_confidence=False, idle_pass=True)
LOOKUP = ProposerTraits("lookup", passes_per_draft="none", has_confidence=False)
MEASURED = PassCosts(
    target=((1, 0.010), (8, 0.012), (32, 0.020)), drafters=(((1, 1e-3), (16, 1.15e-3)),), first_s=(2e-3,)
)


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


def test_start_up_is_where_prices_begin() -> None:
    costs = StepCosts(MEASURED, [MODEL])
    assert [target_s(costs.knots, costs.curve, n) for n in (1, 8, 20, 32)] == pytest.approx(
        [0.010, 0.012, 0.016, 0.020]
    )
    start, one, row, read_in = costs.draft_terms(0)
    assert one + row == pytest.approx(1e-3)
    assert row == pytest.approx(1e-5)
    assert read_in < row
    assert start == pytest.approx(2e-3, rel=0.2)


def test_beyond_what_was_timed_the_curve_goes_on() -> None:
    costs = StepCosts(MEASURED, [MODEL])
    assert target_s(costs.knots, costs.curve, 128.0) == pytest.approx(0.020 + 96 * 0.008 / 24)
    assert costs.knots[-1] >= 4096


def test_a_row_that_begins_a_tile_is_paid_for_by_all_that_fill_it() -> None:
    knots, curve = np.array([1.0, 16.0, 17.0, 32.0]), np.array([1.0, 1.0, 2.0, 2.0])
    assert row_price_s(knots, curve, 8.0, 4.0) == 0.0
    assert row_price_s(knots, curve, 16.0, 1.0) == pytest.approx(1.0)
    assert row_price_s(knots, curve, 16.0, 16.0) == pytest.approx(1 / 16)


def test_a_slow_machine_slows_everything() -> None:
    costs = StepCosts(MEASURED, [MODEL])
    before = costs.draft_s(Drafting(0, 2, 2))
    for _ in range(60):
        costs.observe(MeasuredStep(1, 0, 0, 1.5 * 0.0105))
    assert costs.speed_factor == pytest.approx(1.5, rel=0.1)
    assert costs.draft_s(Drafting(0, 2, 2)) == pytest.approx(1.5 * before, rel=0.1)


def test_what_a_probe_costs_is_not_taken_for_a_slower_machine() -> None:
    costs = StepCosts(MEASURED, [MODEL])
    for _ in range(30):
        costs.observe(MeasuredStep(1, 0, 0, 0.0105))
    before = costs.speed_factor
    for _ in range(10):
        costs.observe(MeasuredStep(9, 0, 0, 0.020, 3e-3, 0, 1, 8, usual=False))
    assert costs.speed_factor == pytest.approx(before, rel=0.03)


def test_one_disturbed_step_changes_little() -> None:
    costs = StepCosts(MEASURED, [MODEL])
    for _ in range(100):
        costs.observe(MeasuredStep(8, 0, 0, 0.0125))
    before = costs.target_s(8, 0, 0)
    costs.observe(MeasuredStep(8, 0, 0, 1.25))
    assert costs.target_s(8, 0, 0) == pytest.approx(before, rel=0.05)


def test_a_start_up_measured_on_a_busy_machine_is_unlearnt() -> None:
    """Eight times too dear, and only one size is seen afterwards."""
    busy = PassCosts(target=tuple((n, 8 * s) for n, s in MEASURED.target), drafters=MEASURED.drafters)
    costs = StepCosts(busy, [MODEL])
    for _ in range(200):
        costs.observe(MeasuredStep(8, 0, 0, 0.0125))
    assert costs.target_s(8, 0, 0) == pytest.approx(0.0125, rel=0.1)


def test_prices_stay_positive_whatever_is_measured() -> None:
    costs, rng = StepCosts(MEASURED, [MODEL]), np.random.default_rng(3)
    for _ in range(2000):
        drafting = (0, 3, 9, 5) if rng.random() < 0.5 else ()
        rows = int(rng.integers(1, 600))
        seconds = rng.exponential(0.02), rng.exponential(0.01)
        costs.observe(MeasuredStep(rows, 10, 20, *seconds, *drafting))
    assert costs.speed_factor > 0
    assert min(*costs.draft_terms(0), *costs.rest_s) > 0
    assert (np.diff(costs.curve) >= 0).all()


def learnt(fixed: float, row: float, one: float, lengths: tuple[int, ...] = (0, 1, 2, 4)) -> StepCosts:
    """From whole steps of 8 requests that draft 0, 1, 2 … tokens, some passes of which verify another length."""
    costs = StepCosts(PassCosts(), [MODEL])
    for verified, drafted in itertools.islice(itertools.cycle(itertools.product(lengths, lengths)), 600):
        rows = 8 * (1 + verified)
        passes = max(0, drafted - 1)
        drafting = (0, passes, 8 * passes) if passes else ()
        costs.observe(MeasuredStep(rows, 0, 0, fixed + row * rows + one * passes, -1.0, *drafting))
    return costs


@pytest.mark.parametrize(("fixed", "row", "one"), [(0.02, 2e-4, 0.004), (0.02, 2e-4, 0.02), (2e-3, 1e-4, 1e-4)])
def test_the_terms_are_learnt_from_how_whole_steps_differ(fixed: float, row: float, one: float) -> None:
    costs = learnt(fixed, row, one)
    for rows in (8, 24, 40):
        assert costs.target_s(rows, 0, 0) == pytest.approx(fixed + row * rows, rel=0.05)
    # A draft's start and its rows are terms of their own; what counts is what drafts take in all.
    for passes in (1, 3):
        assert costs.draft_s(Drafting(0, passes, 8 * passes)) == pytest.approx(one * passes, rel=0.5)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_steps_without_seconds_teach_nothing(seconds: float) -> None:
    costs = learnt(0.02, 2e-4, 0.004)
    before = costs.target_s(8, 0, 0)
    costs.observe(MeasuredStep(8, 0, 0, seconds))
    costs.observe(MeasuredStep(0, 0, 0, 1.0))
    assert costs.target_s(8, 0, 0) == before


def test_a_pass_that_runs_in_every_step_is_a_part_of_it() -> None:
    usual, idle = (StepCosts(MEASURED, [traits]) for traits in (MODEL, IDLE))
    assert idle.target_s(1, 0, 0) - usual.target_s(1, 0, 0) == pytest.approx(3e-3, rel=0.1)


@pytest.mark.parametrize(
    ("traits", "passes", "drafting"),
    [
        (MODEL, (), None),
        (MODEL, (6, 4), Drafting(0, 2, 10)),
        (MODEL, (36, 4), Drafting(0, 2, 10, 30)),
        (IDLE, (6,), None),
        (IDLE, (6, 4, 4), Drafting(0, 2, 8)),
        (ONE, (6,), None),
        (LOOKUP, (), None),
    ],
)
def test_a_pass_that_runs_anyway_is_no_drafting(
    traits: ProposerTraits, passes: tuple[int, ...], drafting: Drafting | None
) -> None:
    assert drafting_in(Work(rows_per_pass=passes), (traits,), 6) == drafting
    assert drafting_in(Work(rows_per_pass=passes), (traits, LOOKUP), 6) == drafting  # which runs no passes
    assert drafting_in(Work(rows_per_pass=passes), (traits, traits), 6) is None


def test_what_a_plan_had_drafted_the_step_before() -> None:
    assert drafting_before(outcome(3, 0, 1), (IDLE,)) == Drafting(0, 2, 4)
    assert drafting_before(outcome(3, 0, 1), (MODEL, LOOKUP)) == Drafting(0, 3, 6)
    assert drafting_before(outcome(1, 1), (IDLE,)) is None
    for requested, traits in (((0, 0), (IDLE,)), ((2,), (LOOKUP,)), ((2,), (ONE,)), ((2,), (MODEL, MODEL))):
        assert drafting_before(outcome(*requested), traits) is None


def test_lookups_beside_a_model_take_nothing_that_counts() -> None:

    mixed = replace(outcome(2, 3), proposer=(0, 1), work=Work(rows_per_pass=(5, 1)))
    assert drafting_of(mixed, (MODEL, LOOKUP)) == Drafting(0, 2, 2, 4)
    assert drafting_of(outcome(0, 0), (MODEL, LOOKUP)) is None
    heads = replace(outcome(3, 0, 1), work=Work(rows_per_pass=(2,)))  # two rows gave four tokens
    assert drafting_of(heads, (replace(ONE, idle_pass=False),)) == Drafting(0, 1, 4)
