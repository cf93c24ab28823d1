from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.contract.step import StopRule
from dynaspec.propose.stopping import stop_mask

CPU = torch.device("cpu")


def lengths(
    rule: StopRule | None, depth: Sequence[int], signals: Sequence[Sequence[float]]
) -> tuple[list[int], list[int]]:
    """(final lengths, rows of each pass) where row i shows ``signals[i]`` pass after pass."""
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
@settings(deadline=None, max_examples=80)
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
