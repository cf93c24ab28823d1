"""Requests whose rules leave no token end with what they have."""

from __future__ import annotations

import pytest

from dynaspec.sampling.grammar import DeadEnd
from unit.engine.fakes import prompt, request
from unit.schedule.driver import TOKEN, Driver

STUCK = DeadEnd("error", "nothing is left")


@pytest.mark.parametrize("accepted", [0, 2])
def test_the_accepted_tokens_are_its_last(accepted: int) -> None:
    driver = Driver()
    one, other = request("a", prompt(9), most=40), request("b", prompt(3, 1), most=6)
    driver.add(one, other)
    driver.step()
    committed = driver.commit(driver.plan(3), accepted, dead_ends={"a": STUCK})
    assert committed.emitted.tolist() == [accepted, accepted + 1]
    assert (one.output, one.finish_reason, one.stop_reason) == ([TOKEN] * (1 + accepted), "error", "nothing is left")
    assert one.lane is None
    driver.finish()
    assert (other.output, other.finish_reason) == ([TOKEN] * 6, "length")
    assert driver.tables.pool.free_count == 64


def test_a_request_may_end_before_its_dead_end() -> None:
    driver = Driver()
    one = request("a", prompt(9), most=40, stop_ids=[9])
    driver.add(one)
    driver.step()
    driver.commit(driver.plan(2), 2, tokens=[[4, 9]], dead_ends={"a": STUCK})
    assert (one.output, one.finish_reason, one.stop_reason) == ([TOKEN, 4, 9], "stop", 9)


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_prompt_may_have_no_continuation(in_flight: bool) -> None:
    driver = Driver()
    one, other = request("a", prompt(9), most=40), request("b", prompt(3, 1), most=2)
    driver.add(one, other)
    first = driver.plan()
    ahead = driver.plan() if in_flight else None
    driver.commit(first, dead_ends={"a": DeadEnd("stop", None)})
    assert (one.output, one.finish_reason, one.stop_reason) == ([], "stop", None)
    if ahead is not None:
        driver.settle(ahead)
        driver.commit(ahead)
    driver.finish()
    assert other.output == [TOKEN] * 2
    assert driver.tables.pool.free_count == 64
