"""The parts of ``auto``, each by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.contract.step import Work
from dynaspec.control.auto.acceptance import AcceptanceModel, Observations, Places, logit, logits
from dynaspec.control.auto.curve import KNOTS, CostCurve
from dynaspec.control.auto.draft_cost import DraftCost
from dynaspec.control.auto.guard import PlainGuard, Prediction
from dynaspec.control.auto.lengths import (
    admit_by_survival,
    chain_depths,
    expected_tokens,
    lookup_depths,
    survivals,
)

FLAT = np.full(KNOTS.size, 2e-3)
STEEP = 1e-3 * KNOTS


def observe(model: AcceptanceModel, feature: float, position: int, place: int, accepted: bool) -> None:
    one = Observations(np.array([feature]), np.array([position]), np.array([place]), np.array([float(accepted)]))
    model.observe(one)


# --- cost ---------------------------------------------------------------------------------------------------------


def test_a_curve_passes_near_what_was_measured_at_start_up() -> None:
    curve = CostCurve(((1, 2e-3), (8, 3e-3), (16, 5e-3), (32, 9e-3)))
    for rows, seconds in ((1, 2e-3), (8, 3e-3), (12, 4e-3), (16, 5e-3), (64, 17e-3)):
        assert curve.at(rows) == pytest.approx(seconds, rel=0.1)


def test_a_curve_follows_measured_passes_and_survives_disturbances() -> None:
    curve, rng = CostCurve(((1, 2e-3), (64, 2e-3))), np.random.default_rng(0)
    for _ in range(400):
        rows = int(rng.choice([1, 8, 32, 64]))
        seconds = (1 + 0.1 * rows) * 1e-3 * (1 + 0.05 * rng.normal())
        curve.observe(rows, seconds * (20 if rng.random() < 0.02 else 1))
        curve.settle()
    for rows in (1, 8, 32, 64):
        assert curve.at(rows) == pytest.approx((1 + 0.1 * rows) * 1e-3, rel=0.15)


def test_noise_of_single_passes_does_not_reach_the_slope() -> None:
    curve, rng = CostCurve(((1, 2e-3), (8, 2.4e-3), (16, 3.6e-3), (32, 6.4e-3))), np.random.default_rng(1)
    slopes = []
    for _ in range(300):
        rows = int(rng.integers(8, 33))
        curve.observe(rows, (1.2 + 0.16 * rows) * 1e-3 * (1 + 0.15 * rng.normal()))
        curve.settle()
        slopes.append(curve.at(25) - curve.at(24))
    assert np.mean(slopes[100:]) == pytest.approx(0.16e-3, rel=0.2)
    assert np.std(slopes[100:]) < 0.05e-3


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(1e-5, 10.0)), max_size=40))
@settings(max_examples=40, deadline=None)
def test_more_rows_never_cost_less(passes: list[tuple[int, float]]) -> None:
    curve = CostCurve(())
    for rows, seconds in passes:
        curve.observe(rows, seconds)
        curve.settle()
    assert (np.diff(curve.seconds) >= 0).all()
    assert (curve.seconds > 0).all()


def test_draft_cost_tells_calls_passes_and_rows_apart() -> None:
    cost, rng = DraftCost((), model=True), np.random.default_rng(0)
    for _ in range(200):
        rows, late = rng.integers(1, 20, rng.integers(1, 6)), int(rng.integers(0, 200))
        seconds = 1e-4 + 3e-4 * rows.size + 1e-5 * rows.sum() + 4e-6 * late
        cost.observe(Work(rows_per_pass=(int(rows[0]) + late, *rows[1:].tolist())), int(rows[0]), seconds)
    found = cost.call, cost.per_pass, cost.per_row, cost.per_row_caught_up
    assert found == pytest.approx((1e-4, 3e-4, 1e-5, 4e-6), rel=0.1)


def test_what_steps_of_one_kind_cannot_tell_apart_stays_as_it_was() -> None:
    cost = DraftCost(((1, 5e-4), (16, 6.5e-4)), model=True)
    before = cost.per_row
    for _ in range(100):
        cost.observe(Work(rows_per_pass=(1, 1)), 1, 1e-3)
    assert cost.per_row == pytest.approx(before, rel=0.2)
    assert cost.call + 2 * cost.per_pass + 2 * cost.per_row == pytest.approx(1e-3, rel=0.05)


@given(st.lists(st.tuples(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.floats(0, 1)), max_size=30))
@settings(max_examples=40, deadline=None)
def test_nothing_costs_less_than_nothing(steps: list[tuple[list[int], float]]) -> None:
    cost = DraftCost((), model=True)
    for rows, seconds in steps:
        cost.observe(Work(rows_per_pass=tuple(rows)), rows[0], seconds)
    assert min(cost.call, cost.per_pass, cost.per_row, cost.per_row_caught_up) >= 0.0


# --- acceptance ---------------------------------------------------------------------------------------------------


def test_learns_the_chance_of_each_position() -> None:
    model, rng = AcceptanceModel(weight=0.0, bias=0.0), np.random.default_rng(0)
    model.grow(1)
    history = []
    for n in range(1500):
        model.age()
        position = n % 3
        observe(model, 0.0, position, 0, bool(rng.random() < (0.9, 0.6, 0.3)[position]))
        history.append(1 / (1 + np.exp(-(model.bias[:3] + model.offset[0]))))
    chances = np.array(history[200:])
    assert chances.mean(0) == pytest.approx([0.9, 0.6, 0.3], abs=0.03)
    assert (chances.std(0) < 0.12).all()


def test_learns_what_a_confidence_is_worth() -> None:
    model, rng = AcceptanceModel(weight=0.7, bias=0.0), np.random.default_rng(0)
    model.grow(1)
    for _ in range(3000):
        model.age()
        x = float(rng.normal(1, 2))
        observe(model, x, 0, 0, bool(rng.random() < 1 / (1 + np.exp(-(1.5 * x - 1.0)))))
    assert model.weight[0] == pytest.approx(1.5, abs=0.35)
    assert model.bias[0] + model.offset[0] == pytest.approx(-1.0, abs=0.5)


def test_a_request_that_differs_is_told_apart_from_the_others() -> None:
    model, rng = AcceptanceModel(weight=0.0, bias=0.0), np.random.default_rng(0)
    model.grow(4)
    for n in range(800):
        place = n % 4
        observe(model, 0.0, 0, place, bool(rng.random() < (0.1 if place == 0 else 0.8)))
        if place == 3:
            model.age()
    assert model.offset[0] < min(model.offset[1:]) - 1.0


def test_one_that_was_given_up_comes_back_to_the_average() -> None:
    model = AcceptanceModel(weight=0.0, bias=1.0)
    model.grow(1)
    for _ in range(20):
        observe(model, 0.0, 0, 0, accepted=False)
    low = model.offset[0]
    for _ in range(300):
        model.age()
    assert abs(model.offset[0]) < 0.1 * abs(low)


def test_what_a_caller_expects_is_where_a_request_starts() -> None:
    model = AcceptanceModel(weight=0.0, bias=0.0)
    model.grow(2)
    model.admit(0, 0.9)
    model.admit(1, None)
    assert 1 / (1 + np.exp(-(model.bias[0] + model.offset[0]))) == pytest.approx(0.9)
    assert model.offset[1] == 0.0


def test_logits_are_finite_whatever_a_drafter_says() -> None:
    values = logits(np.array([0.0, 1.0, float("nan"), 0.5]))
    assert np.isfinite(values).all()
    assert values[3] == 0.0
    assert values[:3].tolist() == pytest.approx([-6.0, 6.0, -6.0])


def test_places_are_used_again() -> None:
    places = Places()
    assert places.get(["a", "b"])[0].tolist() == [0, 1]
    places.forget(["a", "never seen"])
    at, new = places.get(["b", "c", "d"])
    assert at.tolist() == [1, 0, 2]
    assert new == [1, 2]
    assert places.find("a") is None


# --- lengths ------------------------------------------------------------------------------------------------------


def lengths(chance: float, value: float, pass_s: float, requests: int = 1, cap: int = 8) -> list[int]:
    depth, worth = np.empty(requests, np.int64), np.empty(requests)
    chain_depths(
        np.full(8, logit(chance)),
        np.zeros(requests),
        np.full(requests, cap),
        np.ones(cap + 1, np.bool_),
        np.zeros(requests),
        value,
        0.0,
        pass_s,
        0.0,
        KNOTS,
        FLAT,
        float(requests),
        depth,
        worth,
    )
    return depth.tolist()


def test_a_draft_goes_on_as_long_as_the_next_token_pays_for_its_pass() -> None:
    # Survival 0.8, 0.64, 0.51, 0.41, …: with a token worth 1 ms, passes of 0.45 ms pay three times.
    assert lengths(0.8, 1e-3, 0.45e-3) == [3]
    assert lengths(0.8, 1e-3, 0.85e-3) == [0]
    assert lengths(0.8, 1e-3, 0.0) == [8]


def test_several_requests_share_the_price_of_a_pass() -> None:
    assert lengths(0.5, 1e-3, 0.9e-3, requests=1) == [0]
    assert lengths(0.5, 1e-3, 0.9e-3, requests=4) == [2, 2, 2, 2]


def test_lookups_end_where_a_row_costs_more_than_it_brings() -> None:
    depth, worth = np.empty(2, np.int64), np.empty(2)
    zero = np.zeros(2)
    tokens, rows = lookup_depths(
        0.0, np.full(8, logit(0.5)), zero, zero, np.array([8, 0]), 10e-3, KNOTS, STEEP, 2.0, depth, worth
    )
    assert depth.tolist() == [3, 0]  # 5, 2.5, 1.25, 0.625 ms for 1 ms each
    assert tokens == pytest.approx(0.875)
    assert rows == 5.0
    assert expected_tokens(0.0, np.full(8, 0.0), zero, zero, depth) == pytest.approx(0.875)


def test_slots_are_admitted_by_survival_up_to_the_first_that_does_not_pay() -> None:
    survival, lens = np.array([0.9, 0.5, 0.2, 0.8, 0.7]), np.array([3, 2])
    taken = admit_by_survival(survival, lens, 2e-3, KNOTS, STEEP, 2.0, budget=9)
    assert taken.tolist() == [2, 2]  # 0.5 · 2 ms = 1 ms still pays, 0.2 · 2 ms does not
    assert admit_by_survival(survival, lens, 2e-3, KNOTS, STEEP, 2.0, budget=3).tolist() == [1, 2]
    assert admit_by_survival(survival, lens, 2e-3, KNOTS, STEEP, 2.0, budget=1).tolist() == [1, 0]
    assert admit_by_survival(survival, lens, 2e-3, KNOTS, FLAT, 2.0, budget=9).tolist() == [3, 2]


@given(
    confidence=st.lists(st.lists(st.floats(0.01, 0.99), min_size=0, max_size=6), min_size=1, max_size=5),
    changed=st.floats(0.01, 0.99),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_whether_a_slot_is_verified_does_not_depend_on_what_follows_it(
    confidence: list[list[float]], changed: float, data: st.DataObject
) -> None:
    def admitted(rows: list[list[float]]) -> list[int]:
        lens = np.array([len(row) for row in rows])
        flat = logits(np.array([c for row in rows for c in row]))
        survival = survivals(1.0, np.zeros(8), np.zeros(len(rows)), flat, lens)
        return admit_by_survival(survival, lens, 2.5e-3, KNOTS, STEEP, float(len(rows)), 100).tolist()

    before = admitted(confidence)
    request = data.draw(st.integers(0, len(confidence) - 1))
    if before[request] >= len(confidence[request]):
        return
    later = [list(row) for row in confidence]
    for slot in range(before[request] + 1, len(later[request])):
        later[request][slot] = changed
    assert admitted(later)[request] == before[request]


def test_survival_only_falls_along_a_draft() -> None:
    lens = np.array([4, 3])
    found = survivals(1.0, np.zeros(8), np.array([0.5, -0.5]), logits(np.linspace(0.3, 0.9, 7)), lens)
    assert (np.diff(found[:4]) < 0).all()
    assert (np.diff(found[4:]) < 0).all()


# --- guard --------------------------------------------------------------------------------------------------------


def test_plain_decoding_is_tried_rarely_and_more_rarely_the_clearer_the_case() -> None:
    def tries(advantage: float) -> int:
        guard = PlainGuard()
        return sum(guard.decide(advantage, 1.0) == "probe_plain" for _ in range(4000))

    assert 4000 / 60 > tries(1.03) > tries(1.1) > tries(1.3) > tries(3.0) > 0


def test_drafting_is_tried_again_ever_more_rarely() -> None:
    guard = PlainGuard()
    modes = [guard.decide(0.5, 1.0) for _ in range(2000)]
    at = [step for step, mode in enumerate(modes) if mode == "probe_draft"]
    gaps = np.diff(at)
    assert at[0] < 10
    assert (gaps[1:] >= gaps[:-1]).all()
    assert gaps[-1] == gaps[-2]


def test_a_trial_that_paid_is_soon_followed_by_another() -> None:
    guard = PlainGuard()
    while guard.decide(0.5, 1.0) != "probe_draft":
        pass
    guard.tried(paid=True)
    assert "probe_draft" in [guard.decide(0.5, 1.0) for _ in range(4)]


def test_what_steps_really_gave_corrects_the_prediction() -> None:
    guard = PlainGuard()
    for _ in range(300):
        guard.observe(Prediction(True, 3.0, 1.0), 2, 1.0)
    assert guard.speculation.value == pytest.approx(2 / 3, rel=0.1)
    assert guard.decide(1.3, 1.0) == "plain"
    for _ in range(600):
        guard.observe(Prediction(False, 1.0, 1.0), 1, 1.0)
    assert guard.speculation.value == pytest.approx(1.0, rel=0.02)
