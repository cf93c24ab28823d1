"""Which draft lengths pay: against trying all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dynaspec.control.auto.lengths import Slots, Target, admit, fill, own_prices, stop_thresholds, weigh
from dynaspec.control.estimate.costs import target_s

KNOTS = np.array([1.0, 4.0, 8.0, 9.0, 16.0, 17.0, 64.0])
CURVES = {
    "flat": np.array([10.0, 10.1, 10.2, 10.2, 10.4, 10.4, 12.0]),
    "linear": KNOTS + 9.0,
    "stairs": np.array([10.0, 10.0, 10.0, 15.0, 15.0, 20.0, 35.0]),
}


def slots_of(
    rng: np.random.Generator, requests: int, longest: int, one_pass: bool, looked_up: float | None = None
) -> Slots:
    chances = rng.uniform(0.2, 0.98, (requests, longest))
    cap = rng.integers(0, longest + 1, requests)
    survival = np.cumprod(chances, axis=1) * (np.arange(longest) < cap[:, None])
    row_s, read_s = rng.uniform(0.0, 0.2, requests), np.zeros(requests)
    runs = np.ones(requests, np.bool_) if looked_up is None else rng.random(requests) >= looked_up
    start_s, pass_s = rng.uniform(0, 1, 2).tolist()
    price = np.full(requests, rng.uniform(1.0, 6.0))
    price[~runs] *= rng.uniform(0.3, 1.0, np.count_nonzero(~runs))
    return Slots(price, survival, cap, row_s, read_s, runs, start_s, pass_s, one_pass)


def gain(slots: Slots, depth: tuple[int, ...], target: Target) -> float:
    _, seconds, read_s, _ = weigh(1.0, slots, np.array(depth, dtype=np.int64), target)
    accepted = (slots.survival * (np.arange(slots.survival.shape[1]) < np.array(depth)[:, None])).sum(axis=1)
    return float(accepted @ slots.price) - seconds - read_s


@pytest.mark.parametrize("looked_up", [None, 0.5], ids=["one model", "lookups beside it"])
@pytest.mark.parametrize("one_pass", [False, True], ids=["pass a token", "one pass"])
@pytest.mark.parametrize("uniform", [False, True], ids=["ragged", "uniform"])
@pytest.mark.parametrize("levels", [(1, 2, 3), (2, 3)], ids=["dense", "sparse"])
@pytest.mark.parametrize("curve", CURVES)
def test_no_other_lengths_bring_more(
    curve: str, levels: tuple[int, ...], uniform: bool, one_pass: bool, looked_up: float | None
) -> None:
    rng, missed = np.random.default_rng(3), 0
    for _ in range(60):
        slots = slots_of(rng, 3, 3, one_pass, looked_up)
        target = Target(KNOTS, CURVES[curve], 3.0)
        found = tuple(fill(slots, np.array(levels), uniform, target).tolist())
        choices = [[0, *(k for k in levels if k <= cap)] for cap in slots.cap.tolist()]
        options = [d for d in itertools.product(*choices) if any(d)]
        if uniform:
            options = [d for d in options if len(set(d)) == 1]
        if not options:
            assert not any(found)
            continue
        assert found in options
        best = max(gain(slots, d, target) for d in options)
        missed += gain(slots, found, target) < best - 1e-9
    # Sparse lengths are blocks, which a sort need not fill as well as trying all of them.
    assert missed <= (0 if levels == (1, 2, 3) else 3 if looked_up is None else 4)


def test_a_request_that_brings_less_than_reading_it_takes_is_left_out() -> None:
    survival = np.tile([0.8, 0.6], (2, 1))
    price, reading = np.full(2, 4.0), np.array([0.0, 50.0])
    slots = Slots(price, survival, np.full(2, 2), np.zeros(2), reading, np.ones(2, np.bool_), 0.1, 0.1, False)
    depth = fill(slots, np.array([1, 2]), False, Target(KNOTS, CURVES["flat"], 2.0))
    assert depth[0] > depth[1] == 0


def test_one_drafts_even_if_none_pays() -> None:
    slots = Slots(
        np.ones(3),
        np.full((3, 1), 0.01),
        np.ones(3, dtype=np.int64),
        np.ones(3),
        np.zeros(3),
        np.ones(3, np.bool_),
        5.0,
        5.0,
        False,
    )
    assert fill(slots, np.array([1]), False, Target(KNOTS, CURVES["linear"], 3.0)).sum() == 1


def test_a_looked_up_token_is_worth_what_it_takes_at_the_best_length() -> None:
    """Three requests, of which two have found something: of one all eight tokens are right, of the other few."""
    survival, cap, row_s = np.array([[1.0] * 8, [0.1] * 8, [0.0] * 8]), np.array([8, 8, 0]), np.zeros(3)
    target = Target(KNOTS, CURVES["linear"], 3.0)
    plain_s = target_s(KNOTS, CURVES["linear"], 3.0)
    price = own_prices(survival, cap, row_s, target, plain_s)
    none_s = target_s(KNOTS, CURVES["linear"], 3.0)
    rows_s = (target_s(KNOTS, CURVES["linear"], 3.0 + 2 * 8) - none_s) / 2
    assert price == pytest.approx([(plain_s / 3 + rows_s) / 9, plain_s / 3, plain_s / 3])


def test_drafts_that_are_right_are_shorter_where_others_wait() -> None:
    """Alone a request takes all that a lookup has found; with three others, which find nothing, a part of it."""

    def drafted(requests: int) -> int:
        survival, cap = np.zeros((requests, 16)), np.zeros(requests, dtype=np.int64)
        survival[0], cap[0] = 0.95 ** np.arange(1, 17), 16
        target, nothing = Target(np.array([1.0, 64.0]), np.array([2.0, 2.0 + 63 * 0.16]), float(requests)), cap * 0.0
        price = own_prices(survival, cap, nothing, target, target_s(target.knots, target.curve, target.rows))
        slots = Slots(price, survival, cap, nothing, nothing, cap < 0, 0.0, 0.0, False)
        return int(fill(slots, np.arange(1, 17), False, target)[0])

    assert drafted(4) < drafted(1) - 4


def test_thresholds_are_prices_over_what_a_token_brings() -> None:
    target = Target(KNOTS, CURVES["linear"], 2.0)
    own, together = stop_thresholds(4.0, np.full(8, 20.0), 0.5, 0.8, target, np.array([2, 1]), 4)
    assert own == pytest.approx([1.5 / 4.0] * 3)
    assert together == pytest.approx([0.8 / 4.0] * 3)


def test_slots_are_verified_while_they_pay_and_within_the_budget() -> None:
    target, lens = Target(KNOTS, CURVES["linear"], 2.0), np.array([2, 2])
    survival, row_s = np.array([[0.9, 0.5], [0.4, 0.1]]), np.zeros(2)
    assert admit(3.0, survival, lens, row_s, target, 9).tolist() == [2, 1]
    assert admit(3.0, survival, lens, row_s, target, 1).tolist() == [1, 0]
    assert admit(0.5, survival, lens, row_s, target, 9).tolist() == [0, 0]
