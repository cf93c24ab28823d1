from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.bench.explain.acceptance import area_under_curve, by_position, calibrate, chances, learn_acceptance
from dynaspec.bench.explain.data import Verdicts


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
