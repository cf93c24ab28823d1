from __future__ import annotations

import pytest

from dynaspec.schedule.request import Request
from unit.engine.fakes import prompt, request
from unit.schedule.driver import TOKEN, Driver, chunks, ids


def crowd(blocks: int, *, caching: bool = True, prompts: int = 7, most: int = 12) -> tuple[Driver, list[Request]]:
    """Three requests on lanes 0, 1, 2 which will run out of blocks together."""
    driver = Driver(blocks=blocks, lanes=3, caching=caching)
    requests = [request(name, prompt(prompts, i), most=most) for i, name in enumerate("abc")]
    driver.add(*requests)
    driver.step()
    return driver, requests


def test_the_youngest_gives_way_and_waits_at_the_front() -> None:
    driver, (a, b, c) = crowd(9, caching=False)
    late = request("late", prompt(3, 9))
    driver.add(late)
    while not driver.scheduler.preemptions:
        driver.step()
    assert (c.preemptions, b.preemptions, a.preemptions) == (1, 0, 0)
    assert c.lane is None
    assert driver.scheduler.waiting == 2
    driver.finish()
    assert c.first_token_s < late.first_token_s
    assert c.finished_s < late.finished_s


def test_a_preempted_request_goes_on_where_it_was() -> None:
    driver, (_, _, c) = crowd(9, caching=False)
    while not c.preemptions:
        driver.step()
    text = c.tokens().tolist()
    assert len(text) > 8
    while c.lane is None:
        batch = driver.step()
    assert chunks(batch)[-1] == ("c", 0, len(text), True)
    assert driver.lanes.tokens[c.lane, : len(text)].tolist() == text
    driver.finish()
    assert c.output == [TOKEN] * 12


def test_it_finds_its_own_blocks_again() -> None:
    driver, (_, _, c) = crowd(9, prompts=7, most=10)
    while not c.preemptions:
        driver.step()
    while c.lane is None:
        batch = driver.step()
    admission = batch.admitted[-1]
    assert admission.request is c
    # Whatever was not overwritten since is read, not computed.
    assert [chunk.start for chunk in batch.chunks if chunk.request is c] in ([4 * len(admission.cached_blocks)], [])
    assert c.cached_tokens == 0  # nothing of its prompt was there when it arrived


def test_a_request_may_have_to_preempt_itself() -> None:
    driver = Driver(blocks=5, lanes=2, caching=False)
    a, b = request("a", prompt(7), most=12), request("b", prompt(7, 1), most=12)
    driver.add(a, b)
    driver.step()
    while not driver.scheduler.preemptions:
        batch = driver.step()
    assert (a.preemptions, b.preemptions) == (0, 1)
    assert ids(batch) == ["a"]
    driver.finish()
    assert len(a.output) == len(b.output) == 12


@pytest.mark.parametrize("depth", [0, 3, 7])
@pytest.mark.parametrize("caching", [False, True])
def test_every_decoding_request_has_its_slot_and_all_come_to_their_end(depth: int, caching: bool) -> None:
    driver, requests = crowd(7, caching=caching, most=16)
    for _ in range(400):
        batch = driver.plan(depth)
        for request_, lane, length, granted in zip(
            batch.requests, batch.lanes, batch.lengths, batch.granted, strict=True
        ):
            assert request_.lane == lane
            assert 4 * len(driver.tables.blocks(int(lane))) >= length + granted
        if not batch.empty:
            driver.commit(batch, 1)
        if not driver.scheduler.unfinished:
            break
    assert [r.output for r in requests] == [[TOKEN] * 16] * 3
    assert driver.tables.pool.free_count == 7


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    driver, _ = crowd(9, caching=False)
    while not driver.scheduler.preemptions:
        batch = driver.step()
    assert batch.admitted == []
    assert batch.waiting == 1


def test_the_runner_is_told_of_vacated_lanes_once() -> None:
    driver, (_, _, c) = crowd(9, caching=False)
    lane = c.lane
    while not c.preemptions:
        driver.step()
    told = [driver.step().vacated for _ in range(3)]
    assert sum(vacated.count(lane) for vacated in told) == 1
