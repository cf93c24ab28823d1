from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.contract.step import StopRule
from dynaspec.propose import stopping
from dynaspec.propose.stopping import stop_mask

CPU = torch.device("cpu")


def lengths(
    rule: StopRule | None, depth: Sequence[int], signals: Sequence[Sequence[float]]
) -> tuple[list[int], list[int]]:
    """(final lengths, rows of each pass) where row i shows ``signals[i]`` pass after pass: confidences, or signal."""
    mask = stop_mask(rule, np.array(depth, dtype=np.int64), CPU)
    running, rows = np.arange(len(depth)), []
    for done in range(1, max(depth) + 1):
        rows.append(running.size)
        mask.update(done, running, torch.tensor([signals[i][done - 1] for i in running.tolist()]))
        running = mask.running(done)
        if not running.size:
            break
    return mask.lengths().tolist(), rows


def test_without_a_rule_everyone_drafts_what_was_granted() -> None:
    assert lengths(None, [3, 1], [[0.0] * 3, [0.0]]) == ([3, 1], [2, 1, 1])


def test_the_token_that_fell_below_is_kept() -> None:
    assert lengths(StopRule((0.5,), "request"), [4, 4, 4], [[0.4] * 4, [0.6, 0.4, 0.9, 0.9], [0.5] * 4]) == (
        [1, 2, 4],
        [3, 2, 1, 1],
    )


def test_every_pass_has_its_threshold_and_the_last_one_goes_on() -> None:
    signals = [[0.3, 0.3, 0.3, 0.3]]
    assert lengths(StopRule((0.0, 0.2, 0.4), "request"), [4], signals)[0] == [3]
    assert lengths(StopRule((0.2, 0.1), "request"), [4], signals)[0] == [4]
    assert lengths(StopRule((0.2, 0.1, 0.1, 0.5), "request"), [4], signals)[0] == [4]


def test_the_mean_is_over_the_rows_that_still_draft() -> None:
    rule = StopRule((0.5,), "batch_mean")
    # The first row was granted one token only; its 0.0 counts in the first pass, and not afterwards.
    assert lengths(rule, [1, 3], [[0.0], [1.0, 0.6, 0.4]]) == ([1, 3], [2, 1, 1])
    assert lengths(rule, [1, 3], [[0.0], [0.9, 0.9, 0.9]]) == ([1, 1], [2])


def test_a_row_granted_less_stays_so_when_the_batch_stops() -> None:
    rule = StopRule((0.0, 0.5), "batch_mean")
    assert lengths(rule, [1, 2, 4], [[0.1], [0.1] * 2, [0.2] * 4])[0] == [1, 2, 2]


@given(data=st.data(), scope=st.sampled_from(["request", "batch_mean"]))
@settings(max_examples=80)
def test_the_mask_is_the_rule(data: st.DataObject, scope: str) -> None:
    depth = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    below = tuple(data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75]), min_size=1, max_size=6)))
    level = st.sampled_from([0.125, 0.375, 0.625, 0.875])
    signals = [data.draw(st.lists(level, min_size=5, max_size=5)) for _ in depth]
    expected = list(depth)
    for j in range(5):
        threshold = below[min(j, len(below) - 1)]
        alive = [i for i, n in enumerate(expected) if n > j]
        values = [signals[i][j] for i in alive]
        for i in alive:
            value = signals[i][j] if scope == "request" else float(np.mean(values))
            if value < threshold:
                expected[i] = j + 1
    assert lengths(StopRule(below, scope), depth, signals)[0] == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("scope", ["request", "batch_mean"])
def test_rows_may_be_given_in_any_order(scope: str) -> None:
    mask = stop_mask(StopRule((0.5,), scope), np.array([2, 2]), CPU)  # type: ignore[arg-type]
    mask.update(1, np.array([1, 0]), torch.tensor([0.2, 0.9]))
    assert mask.lengths().tolist() == ([2, 1] if scope == "request" else [2, 2])


def survival(below: tuple[float, ...], weight: float = 1.0, scope: str = "request", **calibration: object) -> StopRule:
    return StopRule(below, scope, "survival", weight, **calibration)  # type: ignore[arg-type]


def chance(rule: StopRule, signal: Sequence[float], row: int) -> float:
    """The signal after the whole of ``signal``, from its definition."""
    total = 1.0
    for j, x in enumerate(signal):
        bias = rule.bias[min(j, len(rule.bias) - 1)] if rule.bias else 0.0
        offset = rule.offset[row] if rule.offset else 0.0
        total *= 1 / (1 + np.exp(-(rule.weight * x + bias + offset)))
    return total


def test_survival_is_the_product_over_the_draft() -> None:
    halves = [[0.0] * 4]  # σ(0) = ½ for each token
    assert lengths(survival((0.2,)), [4], halves)[0] == [3]
    assert lengths(survival((0.2, 0.3)), [4], halves)[0] == [2]
    assert lengths(survival((0.0,)), [4], halves)[0] == [4]
    assert lengths(survival((0.49,), weight=0.0, bias=(0.0, 9.0)), [4], halves)[0] == [4]
    assert lengths(survival((0.49,), weight=0.0, bias=(9.0, 0.0)), [4], halves)[0] == [3]


def test_a_request_may_be_better_or_worse_than_others() -> None:
    rule = survival((0.4,), offset=(0.0, 5.0, -5.0))
    assert lengths(rule, [4] * 3, [[0.0] * 4] * 3) == ([2, 4, 1], [3, 2, 1, 1])


class _DeviceMask(stopping._OnDevice):
    """The device's mask on the CPU: the host learns at once what stopped."""

    def _publish(self) -> None:
        self._known = self._lengths.numpy().copy()


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("signal", [-1e30, -100.0, 100.0, 1e30])
@pytest.mark.parametrize("weight", [0.0, 1.0, 500.0])
def test_evidence_of_any_size_is_a_number_like_others(signal: float, weight: float, device: bool) -> None:
    rule, granted = survival((0.5,), weight=weight, bias=(0.3,)), np.array([4])
    mask = _DeviceMask(rule, granted, CPU) if device else stop_mask(rule, granted, CPU)
    for done in range(1, 5):
        mask.update(done, np.array([0]), torch.tensor([signal]))
        if not mask.running(done).size:
            break
    # σ(0.3)² < ½
    assert mask.lengths().tolist() == [2 if weight == 0.0 else 4 if signal > 0 else 1]


def test_evidence_counts_beyond_what_a_confidence_can_say() -> None:
    """The rule takes what it is given: whoever has the signal has cut it, or has not."""
    rule = survival((0.5,), bias=(-7.0,))
    assert lengths(rule, [3], [[6.5] * 3])[0] == [1]
    assert lengths(rule, [3], [[9.0] * 3])[0] == [3]


def test_a_pass_must_be_paid_for_by_all_that_would_go_on() -> None:
    rule = survival((0.1,), total_below=(0.9,))
    fair, poor, good = np.log([0.6 / 0.4, 0.05 / 0.95, 0.9 / 0.1]).tolist()
    # Two at 0.6 bring 2 · 0.5 for a pass of 0.9; after the second, 2 · 0.26 do not.
    assert lengths(rule, [4, 4], [[fair] * 4] * 2) == ([2, 2], [2, 2])
    assert lengths(rule, [4], [[fair] * 4]) == ([1], [1])
    # A row that is at its end, or below its own threshold, pays for nothing.
    assert lengths(rule, [4, 1], [[fair] * 4] * 2) == ([1, 1], [2])
    assert lengths(rule, [4, 4], [[fair] * 4, [poor] * 4]) == ([1, 1], [2])
    assert lengths(survival((0.1,), total_below=(0.0, 9.0)), [4], [[good] * 4])[0] == [2]


@given(data=st.data(), scope=st.sampled_from(["request", "batch_mean"]), device=st.booleans())
@settings(max_examples=250)
def test_survival_on_host_and_device_is_the_rule(data: st.DataObject, scope: str, device: bool) -> None:
    rows = data.draw(st.integers(1, 4))
    depth = data.draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows))
    number = st.floats(-2.0, 2.0, width=32)
    rule = survival(
        tuple(data.draw(st.lists(st.sampled_from([0.0, 0.02, 0.1]) | st.floats(0.0, 1.0), min_size=1, max_size=6))),
        data.draw(st.floats(0.1, 2.0)),
        scope,
        bias=tuple(data.draw(st.lists(number, max_size=3))),
        offset=tuple(data.draw(st.one_of(st.just([]), st.lists(number, min_size=rows, max_size=rows)))),
        total_below=tuple(data.draw(st.lists(st.floats(0.0, 2.0), max_size=2 if scope == "request" else 0))),
    )
    said = st.floats(0.0, 2.0, width=32) | st.floats(-6.0, 8.0, width=32)
    signals = [data.draw(st.lists(said, min_size=5, max_size=5)) for _ in depth]
    granted = np.array(depth, dtype=np.int64)
    mask = _DeviceMask(rule, granted, CPU) if device else stop_mask(rule, granted, CPU)
    expected, running = list(depth), np.arange(rows)
    for done in range(1, max(depth) + 1):
        order = np.array(data.draw(st.permutations(running.tolist())), dtype=np.int64)
        mask.update(done, order, torch.tensor([signals[i][done - 1] for i in order.tolist()]))
        values = {i: chance(rule, signals[i][:done], i) for i in running.tolist()}
        threshold = rule.below[min(done, len(rule.below)) - 1]
        compared = values if scope == "request" else dict.fromkeys(values, float(np.mean(list(values.values()))))
        if any(abs(value - threshold) < 1e-5 for value in compared.values()):
            return  # rounding decides
        for i, value in compared.items():
            if value < threshold:
                expected[i] = done
        going_on = [i for i in running.tolist() if expected[i] > done]
        if rule.total_below and going_on:
            brought = sum(values[i] - threshold for i in going_on)
            needed = rule.total_below[min(done, len(rule.total_below)) - 1]
            if abs(brought - needed) < 1e-4:
                return
            for i in going_on if brought < needed else ():
                expected[i] = done
        running = mask.running(done)
        assert running.tolist() == [i for i, n in enumerate(expected) if n > done]
        if not running.size:
            break
    assert mask.lengths().tolist() == expected
