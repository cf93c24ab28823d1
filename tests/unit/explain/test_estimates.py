"""Acceptance and costs learnt from logs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import Limits, ProposerTraits
from dynaspec.explain.estimates import (
    StepWork,
    area_under_curve,
    by_position,
    calibrate,
    chances,
    fit_costs,
    learn_acceptance,
    recorded_work,
)
from dynaspec.explain.log_data import Verdicts, load
from unit.explain.logs import DRAFT_ROW_S, KV_S, PASS_S, READ_S, REST_S, ROW_S, STEP_S, Fixed, Host


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.5, 0.9]), st.booleans()), min_size=1, max_size=30))
def test_area_under_curve_is_the_chance_of_the_right_order(pairs):
    predicted, accepted = (np.array(column) for column in zip(*pairs, strict=True))
    hits, misses = predicted[accepted], predicted[~accepted]
    area = area_under_curve(predicted, accepted)
    if not hits.size or not misses.size:
        assert area is None
    else:
        order = [1.0 if h > m else 0.5 if h == m else 0.0 for h in hits for m in misses]
        assert area == pytest.approx(np.mean(order))


def test_calibration_of_a_perfect_prediction():
    predicted = np.repeat([0.25, 0.75], 400)
    accepted = np.concatenate([np.arange(400) < 100, np.arange(400) < 300])
    found = calibrate(predicted, accepted)
    assert found.predicted == pytest.approx([0.25, 0.75])
    assert found.observed == pytest.approx([0.25, 0.75])
    assert found.count.tolist() == [400, 400]
    assert found.error == pytest.approx(0.0)
    assert found.auc == pytest.approx(0.75)


def test_calibration_error_and_bounds():
    found = calibrate(np.array([0.0, 1.0, 1.0]), np.array([False, True, False]))
    assert found.observed.tolist() == [0.0, 0.5]
    assert found.error == pytest.approx(0.5 * 2 / 3)


def test_calibration_without_predictions():
    assert calibrate(np.array([np.nan, np.inf]), np.array([True, False])) is None
    assert calibrate(np.zeros(0), np.zeros(0, dtype=bool)) is None


def verdicts(*drafts: tuple[int, int, bool]) -> Verdicts:
    """Of drafts (request, tokens accepted, whether one was rejected behind them)."""
    tests = [
        (request, position, position < right)
        for request, right, rejected in drafts
        for position in range(right + rejected)
    ]
    request, position, accepted = np.array(tests, dtype=np.int64).reshape(-1, 3).T
    none = np.zeros(request.size)
    return Verdicts(request, position, accepted.astype(bool), none, none)


def test_by_position():
    rates = by_position(verdicts((0, 1, True), (0, 2, False), (0, 1, True), (0, 0, True)))
    assert rates.tested.tolist() == [4, 3]
    assert rates.accepted.tolist() == [3, 1]


def test_no_tests_at_all():
    rates = by_position(verdicts())
    assert rates.tested.size == 0
    assert learn_acceptance(verdicts(), 0).offsets(np.arange(0)).size == 0


def test_acceptance_by_position_and_beyond():
    """Of 400 first tokens three quarters are right, of the 300 second ones behind them a third."""
    model = learn_acceptance(verdicts(*[(0, 2, False), (0, 1, True), (0, 1, True), (0, 0, True)] * 100), 1)
    found = chances(model, np.zeros(1, dtype=np.int64), 12)[0]
    assert found[0] == pytest.approx(3 / 4, abs=0.02)
    assert found[1] == pytest.approx(1 / 3, abs=0.02)
    assert found[2:] == pytest.approx(found[1])  # as at the last position tested
    assert chances(model, np.zeros(1, dtype=np.int64), 1).tolist() == [[found[0]]]


def test_a_position_tested_once_is_like_the_one_before():
    model = learn_acceptance(verdicts(*[(0, 1, False), (0, 0, True)] * 50, (0, 2, False)), 1)
    first, second = chances(model, np.zeros(1, dtype=np.int64), 2)[0]
    assert first < second < 0.75


def test_the_order_of_a_log_does_not_matter():
    drafts = [(i % 2, 1, False) if i % 4 else (0, 0, True) for i in range(400)]
    one, other = (learn_acceptance(verdicts(*order), 2) for order in (drafts, drafts[::-1]))
    both = np.arange(2)
    assert chances(one, both, 2) == pytest.approx(chances(other, both, 2), abs=0.02)


def test_few_tests_do_not_make_a_request_special():
    model = learn_acceptance(verdicts(*[(0, 1, False), (0, 0, True)] * 50, (1, 1, False)), 3)
    usual, lucky, unseen = chances(model, np.arange(3), 1)[:, 0]
    assert usual == pytest.approx(0.5, abs=0.05)
    assert unseen == pytest.approx(0.5, abs=0.05)
    assert usual < lucky < 0.7


class Varied(Fixed):
    """Lengths that change every step, which tells all costs apart."""

    def plan(self, view):
        self.length = (view.step * 7) % 9
        return super().plan(view)


def true_price(work: StepWork) -> np.ndarray:
    target = STEP_S + ROW_S * (work.verify_rows + work.prefill_rows) + KV_S * work.kv_tokens + READ_S * work.kv_read
    return target + PASS_S * work.passes + DRAFT_ROW_S * (work.drawn + work.read_in) + REST_S


def imagined(rows: int) -> StepWork:
    """One request with a draft; plain decoding if there is no other row."""
    k = rows - 1
    columns = (rows, 0, 100, 100 * rows, min(k, 1), k, k, 0)
    return StepWork(*(np.full(1, float(value)) for value in columns))


@pytest.mark.parametrize(
    "slow", [lambda step: 1.0, lambda step: 40.0 if step % 9 == 0 else 1.0], ids=["even", "hiccups"]
)
def test_known_costs_are_found(tmp_path, slow) -> None:
    data = load(Host(tmp_path / "log", slow=slow).run(Varied(0), 120))
    costs = fit_costs(data)
    assert costs.error < 0.02
    assert costs.plain_steps == 14
    for rows in (1, 5, 20):
        assert costs.price(imagined(rows)) == pytest.approx(true_price(imagined(rows)), rel=0.05)


def test_a_host_that_measures_steps_only(tmp_path) -> None:
    data = load(Host(tmp_path / "log").run(Varied(0), 120))
    for column in (data.steps.draft_s, data.steps.verify_s):
        column[:] = 0.0
    costs = fit_costs(data)
    assert costs.error < 0.03
    assert costs.price(recorded_work(data)).sum() == pytest.approx(data.steps.step_s.sum(), rel=0.03)


def test_a_start_up_profile_says_what_the_log_cannot(tmp_path) -> None:
    """A fixed length at one batch size leaves it open what a smaller pass costs."""
    curve = tuple((rows, STEP_S + ROW_S * rows) for rows in (1, 2, 4, 8, 16, 32))
    header = {"costs": PassCosts(target=curve)}
    without = fit_costs(load(Host(tmp_path / "a").run(Fixed(5), 40)))
    with_profile = fit_costs(load(Host(tmp_path / "b", header=header).run(Fixed(5), 40)))
    assert (without.profiled, with_profile.profiled) == (False, True)
    plain = imagined(1)
    truth = true_price(plain)
    assert with_profile.price(plain) == pytest.approx(truth, rel=0.1)
    assert abs(without.price(plain) / truth - 1) > abs(with_profile.price(plain) / truth - 1)


def test_beside_a_model_lookups_are_not_what_is_priced(tmp_path) -> None:
    """However much more they draft."""
    lookup = ProposerTraits("ngram", passes_per_draft="none")
    limits = Limits(tuple(range(9)), proposers=(lookup, ProposerTraits("draft_model")))
    data = load(Host(tmp_path / "log", limits=replace(limits, proposers=limits.proposers[1:])).run(Varied(0), 60))
    found = np.where(data.rows.drafted < 8, 0, 1)
    data = replace(data, limits=limits, rows=replace(data.rows, proposer=found))
    costs = fit_costs(data)
    assert costs.drafter == 1
    assert recorded_work(data).drawn.sum() == data.rows.drafted[found == 1].sum()


def test_no_times(tmp_path) -> None:
    assert fit_costs(load(Host(tmp_path / "log", timed=False).run(Fixed(2), 3))) is None
