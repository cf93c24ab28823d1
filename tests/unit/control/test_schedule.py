from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.errors import ConfigError
from dynaspec.control.schedule import KEY, Range, Schedule, parse_schedule, schedule_ranges
from unit.control.seam import UNHURRIED, controller, limits, view

HOST = limits()


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Range, ...]:
    ranges, low = [], 1
    for _ in range(draw(st.integers(1, 5))):
        high = low + draw(st.integers(0, 6))
        ranges.append((low, high, draw(st.integers(0, 9))))
        low = high + 1 + draw(st.integers(0, 4))
    return tuple(ranges)


def k_of(schedule: tuple[Range, ...], batch: int, cap: int) -> int:
    """The definition: the range that holds the batch size, else the last before it."""
    last = 0
    for low, high, k in schedule:
        if low <= batch:
            last = k
        if low <= batch <= high:
            break
    return min(last, cap)


@UNHURRIED
@given(schedules(), st.integers(1, 9), st.integers(1, 60))
def test_ranges_and_lengths_are_those_of_the_definition(schedule: tuple[Range, ...], cap: int, most: int) -> None:
    parsed = parse_schedule([list(entry) for entry in schedule])
    assert parsed == schedule
    ranges = list(schedule_ranges(parsed, cap, most))
    spelled = [k for low, high, k in ranges for _ in range(low, high + 1)]
    assert spelled == [k_of(schedule, batch, cap) for batch in range(1, most + 1)]
    assert ranges[0][0] == 1
    assert all(a[1] + 1 == b[0] and a[2] != b[2] for a, b in pairwise(ranges))
    policy = Schedule(parsed, cap)
    assert spelled[:8] == [policy.length(view("abcdefgh"[:batch], HOST)) for batch in range(1, min(most, 8) + 1)]


def test_it_counts_decoding_requests_only() -> None:
    made = controller(HOST, num_speculative_tokens_per_batch_size=[[1, 2, 4], [3, 8, 1]])
    assert made.plan(view("ab", HOST, prefill=900)).depth == (4, 4)
    assert made.plan(view("abc", HOST)).depth == (1, 1, 1)
    assert made.plan(view("abcdefghij", HOST)).depth == (1,) * 10, "beyond the last range"


def test_a_published_schedule_with_a_gap() -> None:
    ranges = parse_schedule([[1, 16, 3], [64, 128, 2], [256, 4096, 0]])
    assert list(schedule_ranges(ranges, 3, 4096)) == [(1, 63, 3), (64, 255, 2), (256, 4096, 0)]
    assert list(schedule_ranges(ranges, 2, 100)) == [(1, 100, 2)]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([[2, 8, 3]], "a first range that starts at batch size 1, not 2"),
        ([[1, 8, 3], [8, 9, 2]], r"ranges that do not overlap, but \[1, 8, 3\] comes before \[8, 9, 2\]"),
        ([[1, 8, 3], [20, 30, 2], [10, 12, 1]], r"ranges that ascend, but \[20, 30, 2\] comes before \[10, 12, 1\]"),
        ([[1, 8, 3], [12, 10, 2]], r"low ≤ high in every range, but one is \[12, 10, 2\]"),
        ([[0, 8, 3]], "batch sizes of at least 1"),
        ([[1, 8, -1]], "k of at least 0"),
        ([[1, 8]], r"three integers, but one is \[1, 8\]"),
        ([[1, 8, "3"]], "three integers"),
        ([[1, 8, 2.5]], "three integers"),
        ([[1, True, 2]], "three integers"),
        ([], "at least one range"),
        ({"1-8": 3}, "a list of at least one range"),
        ("[[1, 8, 3]]", "a list of at least one range"),
    ],
    ids=str,
)
def test_what_is_no_schedule_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        controller(HOST, num_speculative_tokens_per_batch_size=value)
    assert str(caught.value).startswith(f"{KEY} is {value!r}; expected ")
