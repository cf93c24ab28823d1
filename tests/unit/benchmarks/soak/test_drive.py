from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice

import pytest

from soak_callers import BLUNDERS, Blunder, Call, Choice, Result, Tally, Visit, draw_calls, drive

KNOWN = [[Choice((1, 2), "ab", (), "length")], [Choice((3,), "c", (), "stop"), Choice((4,), "d", (), "stop")]]


def visit(wish: int) -> Visit:
    return Visit(wish, True, "read", 0.0, 1)


def tally_of(call: Call, result: Result) -> Tally:
    tally = Tally()
    tally.add(call, result, KNOWN)
    return tally


def test_calls_are_of_all_kinds_and_always_the_same() -> None:
    calls = list(islice(draw_calls(9, patience_s=2.0, seed=3), 2000))
    assert calls == list(islice(draw_calls(9, patience_s=2.0, seed=3), 2000))
    visits = [call for call in calls if isinstance(call, Visit)]
    assert {call.wish for call in visits} == set(range(9))
    assert {call.fate for call in visits} == {"read", "dawdle", "leave", "cancel"}
    assert max(call.patience_s for call in visits) <= 2.0
    assert {call.name for call in calls if isinstance(call, Blunder)} == {blunder.name for blunder in BLUNDERS}


def test_whole_answers_must_be_equal() -> None:
    good = tally_of(visit(0), Result("answered", KNOWN[0]))
    assert (good.calls, good.failed, good.tokens, good.problems) == (1, 0, 2, [])
    for choices in ([Choice((1, 2), "ab", (), "stop")], [Choice((1,), "a", (), None)], [Choice((1, 9), "ab")]):
        bad = tally_of(visit(0), Result("answered", choices))
        assert (bad.wrong, bad.failed, len(bad.problems)) == (1, 1, 1)


@pytest.mark.parametrize("end", ["left", "cancelled"])
def test_parts_must_be_beginnings(end: str) -> None:
    assert tally_of(visit(1), Result(end, [Choice((3,), "c"), Choice()])).failed == 0
    assert tally_of(visit(1), Result(end, [Choice((4,), "d"), Choice()])).wrong == 1


def test_what_is_broken_has_failed() -> None:
    tally = tally_of(BLUNDERS[0], Result("broken", why="status 200"))
    assert (tally.failed, tally.wrong) == (1, 0)
    assert "status 200" in tally.problems[0]
    assert tally_of(BLUNDERS[0], Result("refused")).failed == 0


def test_only_the_first_problems_are_kept() -> None:
    tally = Tally()
    for _ in range(100):
        tally.add(visit(0), Result("broken", why="x"), KNOWN)
    assert (tally.failed, len(tally.problems)) == (100, 20)


class Desk:
    """Answers every call rightly, after a moment, and knows how many were open at once."""

    def __init__(self) -> None:
        self.open = self.most = 0

    async def call(self, call: Call) -> Result:
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0)
        self.open -= 1
        return Result("answered", KNOWN[call.wish]) if isinstance(call, Visit) else Result("refused")


async def test_as_many_at_once_as_wanted() -> None:
    desk = Desk()
    calls = iter([visit(i % 2) for i in range(50)])
    tally = await drive(desk, calls, KNOWN, 7, lambda: True)
    assert (tally.ends, desk.most) == (Counter(answered=50), 7)


async def test_nothing_is_begun_when_time_is_up() -> None:
    desk, left = Desk(), iter([True] * 5 + [False] * 100)
    tally = await drive(desk, draw_calls(2, patience_s=0.0, seed=0), KNOWN, 3, lambda: next(left))
    assert tally.calls == 5
