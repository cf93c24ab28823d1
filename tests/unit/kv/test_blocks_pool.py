from __future__ import annotations

from collections.abc import Callable

import pytest

from dynaspec.contract.errors import IntegrityError
from dynaspec.kv.blocks import BlockPool


def take(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.try_allocate(count)
    assert blocks is not None
    return blocks


def test_blocks_come_in_order_and_not_more_than_there_are() -> None:
    pool = BlockPool(4)
    assert take(pool, 3) == [0, 1, 2]
    assert pool.free_count == 1
    assert pool.try_allocate(2) is None
    assert pool.free_count == 1
    assert take(pool, 0) == []
    assert take(pool, 1) == [3]


def test_empty_blocks_come_back_before_untouched_ones_in_the_order_of_the_sequence() -> None:
    pool = BlockPool(5)
    pool.release(take(pool, 3))
    assert take(pool, 5) == [0, 1, 2, 3, 4]


def test_a_block_is_free_when_its_last_holder_gives_it_back() -> None:
    pool = BlockPool(2)
    [block] = take(pool, 1)
    pool.share(block)
    pool.release([block])
    assert pool.free_count == 1
    pool.verify_integrity([[block]])
    pool.release([block])
    assert pool.free_count == 2


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = take(pool, 1)
    pool.release(blocks)
    with pytest.raises(IntegrityError, match="released more often"):
        pool.release(blocks)


def test_cached_blocks_are_taken_last_and_the_longest_unused_first() -> None:
    pool = BlockPool(6)
    first, second, plain = take(pool, 2), take(pool, 2), take(pool, 1)
    for block in (*first, *second):
        pool.publish(block, b"%d" % block)
    pool.release(second)
    pool.release(first)
    pool.release(plain)
    # Empty ones; then the cached sequence released first, its later block before its earlier one.
    assert take(pool, 6) == [4, 5, 3, 2, 1, 0]


def test_sharing_a_cached_block_renews_its_turn() -> None:
    pool = BlockPool(2)
    a, b = take(pool, 2)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.release([a])
    pool.release([b])
    pool.share(a)
    assert pool.free_count == 1
    pool.release([a])
    assert take(pool, 1) == [b]
    assert pool.find(b"a") == a


def test_taking_a_cached_block_forgets_its_content() -> None:
    pool = BlockPool(1)
    [block] = take(pool, 1)
    pool.publish(block, b"x")
    pool.release([block])
    assert pool.find(b"x") == block
    take(pool, 1)
    assert pool.find(b"x") is None
    pool.verify_integrity([[block]])


def test_the_first_block_of_a_hash_keeps_it() -> None:
    pool = BlockPool(2)
    a, b = take(pool, 2)
    pool.publish(a, b"x")
    pool.publish(b, b"x")
    assert pool.find(b"x") == a
    pool.publish(a, b"y")  # final content does not change
    assert pool.find(b"y") is None
    pool.verify_integrity([[a, b]])


def test_the_generation_grows_only_with_new_content() -> None:
    pool = BlockPool(2)
    [block] = take(pool, 1)
    before = int(pool.generation[block])
    pool.publish(block, b"x")
    pool.share(block)
    pool.release([block, block])
    pool.share(block)
    assert pool.generation[block] == before
    pool.release([block])
    take(pool, 2)
    assert pool.generation[block] == before + 1


def _hold_nothing(pool: BlockPool) -> list[list[int]]:
    return []


def _hold_twice(pool: BlockPool) -> list[list[int]]:
    return [[0, 1], [1]]


def _free_an_owned_block(pool: BlockPool) -> list[list[int]]:
    pool._free[0] = None
    return [[0, 1]]


def _lose_a_free_block(pool: BlockPool) -> list[list[int]]:
    del pool._free[2]
    return [[0, 1]]


def _point_elsewhere(pool: BlockPool) -> list[list[int]]:
    pool._block_of[b"x"] = 1
    return [[0, 1]]


def _forget_to_index(pool: BlockPool) -> list[list[int]]:
    del pool._block_of[b"x"]
    return [[0, 1]]


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_hold_nothing, "1 references but 0 holders"),
        (_hold_twice, "1 references but 2 holders"),
        (_free_an_owned_block, "free list"),
        (_lose_a_free_block, "free list"),
        (_point_elsewhere, "another content"),
        (_forget_to_index, "does not know"),
    ],
)
def test_integrity_errors(corrupt: Callable[[BlockPool], list[list[int]]], message: str) -> None:
    pool = BlockPool(3)
    take(pool, 2)
    pool.publish(0, b"x")
    pool.verify_integrity([[0, 1]])
    with pytest.raises(IntegrityError, match=message):
        pool.verify_integrity(corrupt(pool))
