from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.bench.explain.acceptance import ByPosition, area_under_curve, by_position, calibrate
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


def test_by_position_and_beyond():
    position, accepted = np.array([0, 0, 0, 0, 1, 1, 1]), np.array([1, 1, 1, 0, 1, 0, 0], dtype=bool)
    none = np.zeros(7)
    rates = by_position(Verdicts(none.astype(int), position, accepted, none, none))
    assert rates.tested.tolist() == [4, 3]
    assert rates.accepted.tolist() == [3, 1]
    assert rates.overall == pytest.approx(4 / 7)
    smoothed = rates.smoothed(4)
    assert 4 / 7 < smoothed[0] < 3 / 4
    assert 1 / 3 < smoothed[1] < 4 / 7
    assert smoothed[1] == smoothed[2] == smoothed[3]
    assert rates.smoothed(1).tolist() == [smoothed[0]]


def test_no_tests_at_all():
    rates = ByPosition(np.zeros(0, dtype=int), np.zeros(0, dtype=int))
    assert rates.overall == 0.0
    assert rates.smoothed(3).tolist() == [0.0, 0.0, 0.0]
