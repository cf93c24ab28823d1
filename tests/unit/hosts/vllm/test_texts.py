"""Requests are known again by what they say, wherever vLLM puts their rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.hosts.vllm.texts import MatchedBatch, Texts

LANES, LONGEST = 4, 24


def meet(texts: Texts, *rows: Sequence[int], brought: Sequence[int] | None = None) -> MatchedBatch:
    """A step of vLLM's.

    Args:
        rows: the texts of its batch.
        brought: tokens that the step has brought each; one by default.
    """
    counts = [1] * len(rows) if brought is None else brought
    tokens = np.full((LANES, LONGEST), 99, dtype=np.int32)
    lengths = np.zeros(LANES, dtype=np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], lengths[i] = row, len(row)
    return texts.meet([list(row[len(row) - n :]) for row, n in zip(rows, counts, strict=True)], lengths, tokens)


def names(texts: Texts, met: MatchedBatch) -> list[str]:
    return list(texts.names(met.lanes.tolist()))


def test_rows_that_stay_keep_their_lanes() -> None:
    texts = Texts(LANES, LONGEST)
    first = meet(texts, [1, 2, 3], [4, 5])
    assert first.before.tolist() == [0, 0]
    second = meet(texts, [1, 2, 3, 7, 8], [4, 5, 6], brought=(2, 1))
    assert second.lanes.tolist() == first.lanes.tolist()
    assert (second.before.tolist(), second.lengths.tolist(), second.brought.tolist()) == ([3, 2], [5, 3], [2, 1])
    assert texts.tokens[second.lanes[0], :5].tolist() == [1, 2, 3, 7, 8]


def test_rows_may_change_places_and_others_may_come_between() -> None:
    texts = Texts(LANES, LONGEST)
    first = meet(texts, [1, 2, 3], [4, 5], [6])
    a, b, c = names(texts, first)
    second = meet(texts, [6, 1], [9, 9], [1, 2, 3, 3], [4, 5, 5])
    assert names(texts, second)[0::2] == [c, a]
    assert names(texts, second)[3] == b
    assert second.before.tolist() == [1, 0, 3, 2]
    assert (second.gone, second.vacated) == ((), ())


def test_who_does_not_come_is_gone_and_comes_back_as_another() -> None:
    """Preempted requests too: their KV is not kept."""
    texts = Texts(LANES, LONGEST)
    first = meet(texts, [1, 2], [3, 4])
    kept, left = names(texts, first)
    second = meet(texts, [1, 2, 3])
    assert (second.gone, second.vacated) == ((left,), (int(first.lanes[1]),))
    third = meet(texts, [1, 2, 3, 4], [3, 4, 5])
    assert names(texts, third)[0] == kept
    assert third.before.tolist() == [3, 0]
    assert names(texts, third)[1] not in (kept, left)


def test_requests_that_say_the_same_have_a_lane_each() -> None:
    texts = Texts(LANES, LONGEST)
    first = meet(texts, [1, 2], [1, 2])
    assert len(set(first.lanes.tolist())) == 2
    second = meet(texts, [1, 2, 3], [1, 2, 4])
    assert sorted(second.lanes.tolist()) == sorted(first.lanes.tolist())
    assert second.before.tolist() == [2, 2]


def test_who_still_reads_has_no_lane() -> None:
    texts = Texts(LANES, LONGEST)
    met = meet(texts, [1, 2, 3], [4, 5, 6, 7], brought=(0, 1))
    assert (met.rows.tolist(), met.lanes.size) == ([1], 1)
    later = meet(texts, [1, 2, 3], [4, 5, 6, 7, 8])
    assert later.before.tolist() == [0, 4]


def test_steps_that_passed_unseen_show() -> None:
    texts = Texts(LANES, LONGEST)
    meet(texts, [1, 2])
    met = meet(texts, [1, 2, 3, 4, 5], brought=(1,))
    assert (met.before.tolist(), met.brought.tolist()) == ([2], [1])
    assert texts.tokens[met.lanes[0], :5].tolist() == [1, 2, 3, 4, 5]


def test_another_text_is_another_request_though_it_is_as_long() -> None:
    texts = Texts(LANES, LONGEST)
    first = meet(texts, [1, 2, 3])
    second = meet(texts, [1, 5, 3, 4])
    assert second.before.tolist() == [0]
    assert second.gone == ("0",)
    assert first.lanes.tolist() == second.lanes.tolist()  # the only one that was ever used is free again


def test_a_text_that_has_not_grown_is_another_request() -> None:
    texts = Texts(LANES, LONGEST)
    meet(texts, [1, 2, 3])
    assert meet(texts, [1, 2, 3]).before.tolist() == [0]


def test_a_request_that_reads_its_text_again_is_gone() -> None:
    """Preempted, and scheduled at once: its row is there, and brings nothing."""
    texts = Texts(LANES, LONGEST)
    meet(texts, [1, 2, 3])
    met = meet(texts, [1, 2, 3, 4], brought=(0,))
    assert (met.rows.size, met.gone, met.vacated) == (0, ("0",), (0,))
    assert meet(texts, [1, 2, 3, 4, 5]).before.tolist() == [0]


def test_lanes_are_used_again_and_names_are_not() -> None:
    texts, seen = Texts(1, LONGEST), list[str]()
    for i in range(8):
        met = meet(texts, [20 + i, 0])
        assert met.lanes.tolist() == [0]
        seen += names(texts, met)
    assert len(set(seen)) == 8


@settings(max_examples=100)
@given(st.data())
def test_every_request_keeps_its_name_for_as_long_as_it_is_there(data: st.DataObject) -> None:
    """With texts that begin with a token of their own, which request is which is plain to see."""
    texts, running, named, fresh = Texts(LANES, LONGEST), dict[int, list[int]](), dict[int, str](), iter(range(50, 99))
    for _ in range(data.draw(st.integers(1, 12))):
        stay = [r for r in running if data.draw(st.booleans())]
        come = [next(fresh) for _ in range(data.draw(st.integers(0, LANES - len(stay))))]
        kept = {r: named[r] for r in stay}
        expected_gone = {named[r] for r in running if r not in stay}
        running = {r: [*running[r], *data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=2))] for r in stay}
        running |= {r: [r, *data.draw(st.lists(st.integers(0, 3), max_size=3))] for r in come}
        order = data.draw(st.permutations(list(running)))
        running = {r: running[r] for r in order if len(running[r]) < LONGEST}
        met = meet(texts, *running.values())
        found = dict(zip(running, names(texts, met), strict=True))
        assert {r: name for r, name in found.items() if r in kept} == {r: kept[r] for r in running if r in kept}
        assert len(set(met.lanes.tolist())) == len(running)
        assert set(met.gone) == expected_gone | {kept[r] for r in kept if r not in running}
        for r, lane in zip(running, met.lanes.tolist(), strict=True):
            assert texts.tokens[lane, : len(running[r])].tolist() == running[r]
        named = found
