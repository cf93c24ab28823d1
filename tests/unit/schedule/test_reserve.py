from __future__ import annotations

import pytest

from unit.engine.fakes import prompt, request
from unit.schedule.driver import Driver


def seated(driver: Driver, *lengths: int, most: int = 20) -> Driver:
    """Requests of these prompt lengths, all about to decode."""
    driver.add(*(request("abcd"[i], prompt(n, i), most=most) for i, n in enumerate(lengths)))
    driver.step()
    return driver


def test_kv_is_reserved_for_the_granted_length_and_no_more() -> None:
    driver = seated(Driver(), 7)
    assert len(driver.tables.blocks(0)) == 2
    driver.plan(4)
    assert len(driver.tables.blocks(0)) == 3  # 8 committed tokens and 4 drafts, in blocks of 4
    assert driver.lanes.expected[0] == 8 + 5


def test_the_longest_request_shrinks_nobody_else() -> None:
    driver = seated(Driver(), 7, 7)
    batch = driver.plan([1, 9])
    assert batch.granted.tolist() == [1, 9]
    assert [len(driver.tables.blocks(lane)) for lane in (0, 1)] == [3, 5]
    assert batch.skipped == {}


def test_no_room() -> None:
    driver = seated(Driver(), 7, most=4)
    batch = driver.plan(5)
    assert batch.room.tolist() == [2]  # one of four tokens is there, one is the target's own
    assert (batch.granted.tolist(), batch.skipped) == ([2], {"no_room": 1})


def test_no_rows() -> None:
    driver = seated(Driver(rows=10), 2, 2, 2)
    batch = driver.plan(5)
    assert batch.granted.tolist() == [5, 2, 0]
    assert batch.skipped == {"no_rows": 2}


def test_no_blocks_and_nobody_is_preempted() -> None:
    driver = seated(Driver(blocks=5), 7, 7)
    assert driver.tables.pool.free_count == 1
    batch = driver.plan(6)
    assert batch.granted.tolist() == [4, 0]
    assert batch.skipped == {"no_blocks": 2}
    assert (driver.scheduler.preemptions, driver.scheduler.running) == (0, 2)


@pytest.mark.parametrize("accepted", range(7))
def test_after_a_rejection_only_the_accepted_tokens_have_ever_been(accepted: int) -> None:
    """Blocks, lengths and prefix cache are those of plain decoding of the same tokens, once the next slot is there."""
    speculative, plain = seated(Driver(), 6, most=40), seated(Driver(), 6, most=40)
    tokens = [10 + i for i in range(accepted + 1)]
    speculative.commit(speculative.plan(6), accepted, tokens=[tokens])
    for token in tokens:
        plain.commit(plain.plan(), tokens=[[token]])
    speculative.plan()
    plain.plan()
    assert speculative.snapshot() == plain.snapshot()
    length = int(plain.lanes.length[0])
    assert speculative.lanes.tokens[0, :length].tolist() == plain.lanes.tokens[0, :length].tolist()


def test_a_step_that_accepts_nothing_is_a_plain_step() -> None:
    speculative, plain = seated(Driver(), 6, most=40), seated(Driver(), 6, most=40)
    for depth in (6, 1, 9, 0):
        speculative.step(depth)
        plain.step()
    assert speculative.snapshot() == plain.snapshot()


def test_tokens_behind_the_end_are_neither_committed_nor_hashed() -> None:
    driver = Driver()
    driver.add(request("a", prompt(6), most=40, stop_ids=[9]))
    driver.step()
    one = driver.lanes.requests[0]
    batch = driver.plan(6)
    committed = driver.commit(batch, 6, tokens=[[4, 9, 5, 5, 5, 5, 5]])
    assert committed.emitted.tolist() == [2]
    assert one is not None
    assert one.draft_counts is not None
    assert (one.output[1:], one.finish_reason, one.draft_counts.accepted) == ([4, 9], "stop", 2)
    assert len(driver.tables.pool._block_of) == 2  # 9 tokens: two full blocks, not three
    assert driver.tables.pool.free_count == 64


def test_every_node_of_a_tree_has_kv_until_its_step_is_over() -> None:
    driver = seated(Driver(), 7)
    batch = driver.plan(3, nodes=14)
    assert len(driver.tables.blocks(0)) == 6  # 8 committed tokens and 14 nodes
    assert driver.lanes.expected[0] == 8 + 4  # no more can be accepted
    driver.commit(batch, 2)
    assert len(driver.tables.blocks(0)) == 3


def test_trees_are_cut_to_the_rows_and_blocks_that_there_are() -> None:
    driver = seated(Driver(rows=12), 2, 2)
    driver.plan(3, nodes=8)
    assert driver.planned is not None
    assert driver.planned.nodes == (8, 2)
    assert driver.planned.depth == (3, 2)
    driver = seated(Driver(blocks=6), 7, 3)
    batch = driver.plan(3, nodes=20)
    held = [4 * len(driver.tables.blocks(lane)) for lane in (0, 1)]
    assert driver.planned is not None
    for length, nodes, room in zip(batch.lengths.tolist(), driver.planned.nodes, held, strict=True):
        assert length + nodes <= room
    assert driver.planned.nodes[0] == 12


def test_a_request_without_room_has_no_tree() -> None:
    driver = seated(Driver(), 7, 7, most=2)
    driver.plan(3, nodes=14)
    assert driver.planned is not None
    assert (driver.planned.depth, driver.planned.nodes) == ((0, 0), (0, 0))
