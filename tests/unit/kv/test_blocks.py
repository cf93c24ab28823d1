from __future__ import annotations

import numpy as np
import pytest

from dynaspec.contract.errors import IntegrityError
from dynaspec.kv.blocks import BlockPool, BlockTables

SIZE = 4


def make(num_blocks: int = 8, lanes: int = 3, *, caching: bool = True) -> BlockTables:
    return BlockTables(BlockPool(num_blocks), lanes, 30, SIZE, caching=caching)


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_an_opened_lane_has_just_the_blocks_it_needs() -> None:
    tables = make()
    assert tables.try_open(0, [], 5)
    assert tables.blocks(0) == [0, 1]
    assert tables.array[0, :2].tolist() == [0, 1]
    assert tables.array.shape == (3, 8)
    assert tables.pool.free_count == 6


def test_nothing_changes_where_blocks_run_out() -> None:
    tables = make(3)
    assert tables.try_open(0, [], 2 * SIZE)
    assert not tables.try_open(1, [], 2 * SIZE)
    assert not tables.try_grow(0, 4 * SIZE)
    assert (tables.blocks(0), tables.blocks(1)) == ([0, 1], [])
    tables.verify_integrity()


def test_growing_and_shrinking() -> None:
    tables = make()
    tables.try_open(0, [], 1)
    assert tables.try_grow(0, SIZE)
    assert tables.blocks(0) == [0]
    assert tables.try_grow(0, SIZE + 1)
    assert tables.try_grow(0, 3 * SIZE)
    assert tables.array[0, :3].tolist() == tables.blocks(0) == [0, 1, 2]
    tables.shrink(0, SIZE + 1)
    assert tables.blocks(0) == [0, 1]
    tables.shrink(0, 3 * SIZE)  # does not grow
    assert tables.blocks(0) == [0, 1]
    tables.close(0)
    assert tables.blocks(0) == []
    assert tables.pool.free_count == 8


def test_growing_back_after_a_rollback_is_as_if_nothing_had_been() -> None:
    tables = make()
    tables.try_open(0, [], 6)
    before = (list(tables.blocks(0)), tables.pool.free_count)
    tables.try_grow(0, 6 + 8)
    tables.shrink(0, 6)
    assert (tables.blocks(0), tables.pool.free_count) == before
    assert tables.pool.try_allocate(1) == [2]


def test_a_prefix_is_shared_between_lanes() -> None:
    tables = make()
    tokens = text(*range(10))
    tables.try_open(0, [], 10)
    tables.publish(0, tokens, 9)
    cached = tables.match(text(*range(8), 20, 21))
    assert cached == tables.blocks(0)[:2]
    assert tables.try_open(1, cached, 10)
    assert tables.blocks(1)[:2] == tables.blocks(0)[:2]
    assert tables.blocks(1)[2] != tables.blocks(0)[2]
    tables.verify_integrity()
    tables.close(0)
    tables.verify_integrity()
    assert tables.match(tokens) == tables.blocks(1)[:2]


def test_a_prefix_is_shared_by_equal_salts_alone() -> None:
    tables = make()
    tokens = text(*range(10))
    tables.try_open(0, [], 10, "a")
    tables.publish(0, tokens, 9)
    assert tables.match(tokens, "a") == tables.blocks(0)[:2]
    assert tables.match(tokens, "b") == tables.match(tokens) == []
    tables.try_open(1, [], 10)
    tables.publish(1, tokens, 9)
    assert tables.match(tokens) == tables.blocks(1)[:2]
    tables.close(0)
    tables.try_open(0, [], 10)  # the lane's next request has none
    tables.publish(0, text(*range(20, 30)), 9)
    assert tables.match(text(*range(20, 30))) == tables.blocks(0)[:2]
    tables.verify_integrity()


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_a_match_leaves_at_least_the_last_token(length: int, blocks: int) -> None:
    tables = make()
    tokens = text(*range(14))
    tables.try_open(0, [], 14)
    tables.publish(0, tokens, 12)
    assert tables.match(tokens[:length]) == tables.blocks(0)[:blocks]


def test_a_match_ends_at_the_first_difference_even_if_later_blocks_agree() -> None:
    tables = make()
    tables.try_open(0, [], 12)
    tables.publish(0, text(*range(12)), 12)
    assert tables.match(text(9, *range(1, 12), 5)) == []
    assert tables.match(text(*range(4), 9, *range(5, 12), 5)) == tables.blocks(0)[:1]


def test_only_full_blocks_of_computed_tokens_are_offered() -> None:
    tables = make()
    tokens = text(*range(12))
    tables.try_open(0, [], 12)
    tables.publish(0, tokens, 7)
    assert tables.match(tokens) == [0]
    tables.publish(0, tokens, 8)
    assert tables.match(tokens) == [0, 1]
    # What lies behind ``computed`` has left no trace: the same blocks with other tokens later are found as those.
    tokens[8:] = 50
    tables.publish(0, tokens, 12)
    assert tables.match(text(*range(12), 0)) == [0, 1]
    assert tables.match(text(*tokens, 0)) == [0, 1, 2]


def test_a_failed_opening_leaves_the_cached_blocks_cached() -> None:
    tables = make(3)
    tokens = text(*range(9))
    tables.try_open(0, [], 9)
    tables.publish(0, tokens, 8)
    tables.close(0)
    cached = tables.match(tokens)
    assert not tables.try_open(1, cached, 20)
    tables.verify_integrity()
    assert tables.match(tokens) == cached
    assert tables.pool.free_count == 3


def test_without_caching_nothing_is_found() -> None:
    tables = make(caching=False)
    tables.try_open(0, [], 12)
    tables.publish(0, text(*range(12)), 12)
    assert tables.match(text(*range(12))) == []


def test_a_table_row_that_differs_is_an_integrity_error() -> None:
    tables = make()
    tables.try_open(1, [], 9)
    tables.array[1, 1] = 7
    with pytest.raises(IntegrityError, match="lane 1"):
        tables.verify_integrity()
