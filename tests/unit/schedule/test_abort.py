from __future__ import annotations

import pytest

from unit.engine.fakes import prompt, request
from unit.schedule.driver import TOKEN, Driver, ids


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_in_any_state_gives_everything_back(steps: int, in_flight: bool) -> None:
    """Waiting, prefilling, about to decode, decoding; with a step of its own in flight or not."""
    driver = Driver(rows=8)
    one, other = request("a", prompt(12), most=40), request("b", prompt(3, 1), most=6)
    driver.add(one, other)
    for _ in range(steps):
        driver.step(depth=2, accepted=1)
    batch = driver.plan(2) if in_flight else None
    before = list(one.output)
    driver.scheduler.abort(one)
    driver.scheduler.verify_integrity()
    assert (one.finish_reason, one.lane) == ("abort", None)
    if batch is not None:
        committed = driver.commit(batch, 2)
        assert [n for r, n in zip(batch.requests, committed.emitted, strict=True) if r is one] in ([], [0])
    driver.finish()
    assert one.output == before
    assert (other.output, other.finish_reason) == ([TOKEN] * 6, "length")
    assert driver.tables.pool.free_count == 64
    driver.plan()
    assert driver.lanes.free_count == 4


def test_aborting_twice_or_after_the_end_changes_nothing() -> None:
    driver = Driver()
    one = request("a", prompt(3), most=2)
    driver.add(one)
    driver.finish()
    driver.scheduler.abort(one)
    assert one.finish_reason == "length"
    waiting = request("b", prompt(3))
    driver.add(waiting)
    driver.scheduler.abort(waiting)
    ended = waiting.finished_s
    driver.scheduler.abort(waiting)
    assert (waiting.finish_reason, waiting.finished_s, driver.scheduler.unfinished) == ("abort", ended, False)


def test_the_lane_of_an_aborted_request_is_not_reused_while_a_step_may_read_it() -> None:
    driver = Driver(lanes=2)
    one, two = request("a", prompt(3), most=40), request("b", prompt(3, 1), most=40)
    driver.add(one, two, request("c", prompt(3, 2), most=40))
    driver.step()
    flying = driver.plan(2)
    driver.scheduler.abort(one)
    ahead = driver.plan(1)  # planned while the other is in flight
    assert (ids(ahead), ahead.admitted) == (["b"], [])
    driver.commit(flying)
    driver.settle(ahead)
    driver.commit(ahead)
    batch = driver.plan()
    assert [(a.request.id, a.lane) for a in batch.admitted] == [("c", 0)]
    assert batch.vacated == [0]
