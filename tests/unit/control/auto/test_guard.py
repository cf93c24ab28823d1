"""Plain decoding or speculation: how often each is tried, and what measured steps change."""

from __future__ import annotations

import numpy as np
import pytest

from dynaspec.control.auto.guard import PlainGuard, Prediction, Ratio


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


def test_a_ratio_is_tokens_a_second_measured_over_predicted() -> None:
    ratio = Ratio()
    assert ratio.value == 1.0
    for _ in range(1000):
        ratio.observe(2.0, 0.5, 4.0, 0.5)
    assert ratio.value == pytest.approx(0.5, rel=0.01)
    for _ in range(1000):
        ratio.observe(4.0, 0.75, 4.0, 0.5)
    assert ratio.value == pytest.approx(2 / 3, rel=0.01)
    for _ in range(1000):
        ratio.rest()
    assert ratio.value == pytest.approx(1.0, rel=0.01)


def test_a_step_that_was_disturbed_counts_as_twice_as_long_only() -> None:
    slow, stuck = Ratio(), Ratio()
    slow.observe(1.0, 2.0, 1.0, 1.0)
    stuck.observe(1.0, 500.0, 1.0, 1.0)
    assert slow.value == stuck.value < 1.0


def test_steps_of_all_sizes_count_alike() -> None:
    small, large = Ratio(), Ratio()
    for _ in range(20):
        small.observe(1.0, 0.01, 2.0, 0.01)
        large.observe(50.0, 3.0, 100.0, 3.0)
    assert small.value == pytest.approx(large.value)
