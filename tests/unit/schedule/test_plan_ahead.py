"""A step is planned while the one before has not been committed."""

from __future__ import annotations

import numpy as np

from dynaspec.schedule.batch import StepBatch
from unit.engine.fakes import prompt, request
from unit.schedule.driver import TOKEN, Driver, chunks, ids


def lengths(driver: Driver, lane: int) -> tuple[int, int, int, int]:
    lanes = driver.lanes
    return tuple(int(c[lane]) for c in (lanes.length, lanes.computed, lanes.expected, lanes.expected_computed))  # type: ignore[return-value]


def decoding(most: int = 60, prompts: int = 6, **options: int) -> Driver:
    driver = Driver(**options)
    driver.add(request("a", prompt(prompts), most=most))
    driver.step()
    return driver


def test_a_step_is_planned_for_the_most_that_the_one_before_may_commit() -> None:
    driver = decoding()
    driver.plan(5)
    assert lengths(driver, 0) == (7, 6, 13, 12)
    ahead = driver.plan(3)
    assert ahead.lengths.tolist() == [13]
    assert ahead.room.tolist() == [66 - 13 - 1]
    assert lengths(driver, 0) == (7, 6, 17, 16)
    assert len(driver.tables.blocks(0)) == 4  # 13 + 3 tokens in blocks of 4


def test_the_surplus_is_subtracted_and_its_blocks_are_given_back() -> None:
    driver = decoding()
    flying, ahead = driver.plan(5), driver.plan(3)
    driver.commit(flying, 1)
    assert lengths(driver, 0) == (9, 8, 13, 12)
    assert len(driver.tables.blocks(0)) == 4  # the step ahead may still reach token 13
    assert driver.settle(ahead) is None
    assert ahead.lengths.tolist() == [9]
    assert ahead.granted.tolist() == [3]
    driver.commit(ahead, 0)
    assert lengths(driver, 0) == (10, 9, 10, 9)
    assert len(driver.tables.blocks(0)) == 3


def test_nodes_of_the_step_ahead_keep_their_blocks() -> None:
    driver = decoding()
    flying, ahead = driver.plan(2, nodes=6), driver.plan(3, nodes=12)
    driver.commit(flying, 0)
    driver.settle(ahead)
    assert ahead.lengths.tolist() == [8]
    assert 4 * len(driver.tables.blocks(0)) >= 8 + 12
    driver.commit(ahead, 1)
    assert len(driver.tables.blocks(0)) == 3


def test_nodes_keep_no_blocks_where_the_step_ahead_is_of_others() -> None:
    """The first request may be about to end, so that the step ahead leaves it out."""
    driver = Driver()
    driver.add(request("a", prompt(6), most=5), request("b", prompt(6, 1), most=60))
    driver.step()
    flying = driver.plan(3, nodes=20)
    ahead = driver.plan(3, nodes=12)
    assert ids(ahead) == ["b"]
    driver.commit(flying, 0)
    assert len(driver.tables.blocks(0)) == 2
    driver.settle(ahead)
    driver.commit(ahead, 0)
    assert [len(driver.tables.blocks(lane)) for lane in (0, 1)] == [2, 3]


def test_lengths_are_equal_whenever_nothing_is_in_flight() -> None:
    driver = decoding()
    rng = np.random.default_rng(0)
    flying = driver.plan(5)
    for depth in (3, 0, 5, 5, 3, 0, 5):
        ahead = driver.plan(depth)
        driver.commit(flying, int(rng.integers(0, 6)))
        driver.settle(ahead)
        length, computed, expected, expected_computed = lengths(driver, 0)
        assert expected - length == expected_computed - computed == depth + 1
        flying = ahead
    driver.commit(flying, 2)
    length, computed, expected, expected_computed = lengths(driver, 0)
    assert (expected, expected_computed, computed) == (length, computed, length - 1)


def test_nothing_is_planned_for_a_request_that_may_be_about_to_end() -> None:
    driver = decoding(most=7)
    flying = driver.plan(5)  # may give all six tokens that are left
    assert driver.plan(5).empty
    driver.commit(flying, 2)
    batch = driver.plan(5)
    assert (ids(batch), batch.granted.tolist()) == (["a"], [2])


def test_a_finished_request_leaves_the_step_planned_ahead() -> None:
    driver = Driver()
    driver.add(request("a", prompt(5), most=40, stop_ids=[9]), request("b", prompt(5, 1), most=40))
    driver.step()
    flying, ahead = driver.plan(2), driver.plan(4)
    driver.commit(flying, 1, tokens=[[9, 9], [5, 5]])
    assert driver.settle(ahead) == [1]
    assert (ids(ahead), ahead.lanes.tolist(), ahead.granted.tolist(), ahead.room.tolist()) == (
        ["b"],
        [1],
        [4],
        [45 - 9 - 1],
    )
    assert ahead.lengths.tolist() == [8]
    driver.commit(ahead, 4)
    assert lengths(driver, 1) == (13, 12, 13, 12)


def test_all_requests_of_a_planned_step_may_leave_before_it_runs() -> None:
    driver = Driver(lanes=1)
    driver.add(request("a", prompt(5), most=40, stop_ids=[9]), request("b", prompt(5, 1), most=3))
    driver.step()
    flying, ahead = driver.plan(2), driver.plan(4)
    driver.commit(flying, 0, tokens=[[9]])
    driver.settle(ahead)
    assert ahead.empty
    assert driver.tables.pool.free_count == 64
    batch = driver.plan()
    assert [(a.request.id, a.lane) for a in batch.admitted] == [("b", 0)]
    assert batch.vacated == [0]


def test_lanes_vacated_in_a_step_that_is_never_run_are_told_of_later() -> None:
    driver = Driver(lanes=2)
    driver.add(request("a", prompt(3), most=1), request("b", prompt(5), most=40, stop_ids=[9]))
    driver.step()  # a ends
    flying = driver.plan(0)
    told = flying.vacated
    ahead = driver.plan(0)
    driver.commit(flying, 0, tokens=[[9]])
    told = [*told, *ahead.vacated]
    driver.settle(ahead)
    assert ahead.empty
    driver.add(request("c", prompt(3)))
    told_again = driver.plan().vacated
    assert 0 in [*told, *told_again]
    assert 1 in told_again


def test_prefill_chunks_are_planned_ahead() -> None:
    driver = Driver(rows=8)
    driver.add(request("a", prompt(20), most=40))
    steps = [driver.plan(3) for _ in range(1)]
    planned = [chunks(steps[0])]
    for _ in range(4):
        ahead = driver.plan(3)
        planned.append(chunks(ahead) or ids(ahead))
        driver.commit(steps[-1], 3)
        driver.settle(ahead)
        steps.append(ahead)
    assert planned == [[("a", 0, 8, False)], [("a", 8, 8, False)], [("a", 16, 4, True)], ["a"], ["a"]]


def test_a_preempted_requests_step_in_flight_counts_for_nothing() -> None:
    driver = Driver(blocks=6, lanes=2, caching=False)
    a, b = request("a", prompt(7), most=12), request("b", prompt(7, 1), most=12)
    driver.add(a, b)
    driver.step()
    flying: StepBatch = driver.plan(4)
    before = list(b.output)
    ahead = driver.plan(0)
    while not b.preemptions:
        driver.commit(flying, 4)
        driver.settle(ahead)
        before = list(b.output)
        flying, ahead = ahead, driver.plan(0)
    assert "b" in ids(flying)
    committed = driver.commit(flying, 4)
    assert committed.emitted[ids(flying).index("b")] == 0
    assert b.output == before
    driver.settle(ahead)
    if not ahead.empty:
        driver.commit(ahead)
    driver.finish()
    assert (a.output, b.output) == ([TOKEN] * 12, [TOKEN] * 12)
    assert driver.tables.pool.free_count == 6


def test_a_failed_step_and_the_one_planned_on_it_are_given_up_and_recomputed() -> None:
    driver = Driver(lanes=3, rows=16)
    everyone = [request(name, prompt(5 + i, i), most=12) for i, name in enumerate("abc")]
    driver.add(*everyone, request("d", prompt(9, 9), most=12))
    driver.step()
    driver.step(3, accepted=2)
    before = [list(one.output) for one in everyone]
    failed, ahead = driver.plan(4), driver.plan(2)
    for batch in (failed, ahead):
        driver.scheduler.discard(batch)
        driver.scheduler.verify_integrity()
    assert [one.output for one in everyone] == before
    assert [one.lane for one in everyone] == [None] * 3
    assert driver.tables.pool.free_count == 64
    batch = driver.plan()
    assert [a.request.id for a in batch.admitted] == ["a", "b", "c"]
    driver.commit(batch)
    driver.finish()
    assert [one.output for one in everyone] == [[TOKEN] * 12] * 3
