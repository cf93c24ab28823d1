from __future__ import annotations

import numpy as np
import pytest

from dynaspec.kv.blocks import BlockTables
from dynaspec.propose.watermark import Watermarks
from unit.propose.batches import block_tables


def one_lane(size: int = 4) -> tuple[BlockTables, Watermarks]:
    tables = block_tables(8, size=size)
    return tables, Watermarks(tables, 4)


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def ingest(marks: Watermarks, seen: int, lane: int = 0) -> int:
    return marks.ingest(column(lane), column(seen))


def settle(marks: Watermarks, length: int, accepted: int, lane: int = 0) -> None:
    marks.settle(column(lane), column(length), column(accepted))


def drafted(marks: Watermarks, length: int, k: int) -> None:
    """What a draft of k tokens after ``length`` committed ones leaves: its last token is never ingested."""
    ingest(marks, length)
    marks.ingest_drafts(column(0), column(k - 1), column(k - 1))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_full_acceptance_leaves_a_lag_of_one(k: int) -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 20)
    drafted(marks, 10, k)
    settle(marks, 10, k)
    length = 10 + k + 1
    assert length - 1 - marks.seen[0] == 1


@pytest.mark.parametrize("accepted", range(5))
def test_otherwise_no_lag_is_left(accepted: int) -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 20)
    drafted(marks, 10, 5)
    settle(marks, 10, accepted)
    assert marks.seen[0] == 10 + accepted


def test_steps_without_drafts_leave_the_watermark() -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 20)
    drafted(marks, 10, 3)
    settle(marks, 10, 1)
    for length in (12, 13, 14):
        settle(marks, length, 0)
    assert marks.seen[0] == 11
    ingest(marks, 15)
    assert marks.seen[0] == 15


def test_drafts_that_were_never_settled_are_forgotten_with_the_next_ingestion() -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 20)
    drafted(marks, 10, 5)
    ingest(marks, 12)
    settle(marks, 12, 3)
    assert marks.seen[0] == 12


def test_a_prefix_hit_counts_where_the_drafter_has_seen_the_blocks() -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 12)
    ingest(marks, 9)
    marks.admit(1, tables.blocks(0))
    assert marks.seen[1] == 8  # the third block is not full


def test_accepted_drafts_make_blocks_valid_too() -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 16)
    drafted(marks, 6, 5)
    settle(marks, 6, 3)
    marks.admit(1, tables.blocks(0))
    assert marks.seen[1] == 8
    drafted(marks, 10, 4)
    settle(marks, 10, 1)  # the first draft is the last token of nothing: 11 seen
    marks.admit(1, tables.blocks(0))
    assert marks.seen[1] == 8


def test_a_hit_ends_at_the_first_block_that_the_drafter_lacks() -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 8)
    tables.try_open(1, [], 8)
    ingest(marks, 8)
    first, second = tables.blocks(0)
    unseen = tables.blocks(1)[0]
    marks.admit(2, [first, unseen, second])
    assert marks.seen[2] == 4
    marks.admit(2, [unseen, first])
    assert marks.seen[2] == 0
    marks.admit(2, [])
    assert marks.seen[2] == 0


def test_a_block_with_new_content_is_not_a_hit() -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 8)
    ingest(marks, 8)
    old = list(tables.blocks(0))
    tables.close(0)
    tables.try_open(1, [], 8)  # the same blocks, with content that this drafter has not seen
    assert tables.blocks(1) == old
    marks.admit(2, old)
    assert marks.seen[2] == 0


def test_a_lane_starts_anew() -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 20)
    drafted(marks, 10, 5)
    marks.admit(0, ())
    settle(marks, 3, 2)
    assert marks.seen[0] == 0


def gated(marks: Watermarks, length: int, processed: int, in_place: int) -> None:
    """A draft of which so many tokens were processed, and only the first few left KV."""
    ingest(marks, length)
    marks.ingest_drafts(column(0), column(processed), column(in_place))


@pytest.mark.parametrize(("accepted", "seen", "wasted"), [(0, 10, 0), (1, 11, 0), (2, 11, 1), (4, 11, 3), (5, 11, 3)])
def test_drafts_behind_the_first_without_kv_are_processed_again_if_accepted(
    accepted: int, seen: int, wasted: int
) -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 24)
    gated(marks, 10, 4, 1)  # the fifth token, if there was one, was never processed
    settle(marks, 10, accepted)
    assert marks.seen[0] == seen
    for length in range(11 + accepted, 14 + accepted):  # steps without speculation
        settle(marks, length, 0)
    assert ingest(marks, 14 + accepted) == wasted
    assert ingest(marks, 15 + accepted) == 0


def test_work_in_vain_is_counted_as_it_is_done_again() -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 24)
    gated(marks, 10, 3, 0)
    settle(marks, 10, 3)
    assert [ingest(marks, seen) for seen in (12, 14, 15)] == [2, 1, 0]
    gated(marks, 15, 1, 0)
    settle(marks, 15, 1)
    marks.admit(0, ())
    assert ingest(marks, 5) == 0


def test_blocks_with_gaps_are_not_valid() -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 16)
    gated(marks, 6, 3, 1)
    settle(marks, 6, 3)
    marks.admit(1, tables.blocks(0))
    assert marks.seen[1] == 4
    ingest(marks, 10)
    marks.admit(1, tables.blocks(0))
    assert marks.seen[1] == 8


def test_where_no_drafts_are_open_a_step_settles_nothing() -> None:
    tables, marks = one_lane()
    tables.try_open(0, [], 20)
    drafted(marks, 10, 5)
    settle(marks, 10, 2)
    for length in (13, 16):  # a lookup's drafts, that this drafter has not seen
        settle(marks, length, 2)
        assert marks.seen[0] == 12


def test_drafts_of_a_step_that_failed_are_not_the_next_ones() -> None:
    tables, marks = one_lane()
    for lane in (0, 1):
        tables.try_open(lane, [], 12)
        ingest(marks, 6, lane)
    marks.ingest_drafts(column(0, 1), column(3, 3), column(3, 1))
    settle(marks, 6, 1)  # lane 1 is not in the step that came through
    ingest(marks, 8)
    marks.ingest_drafts(column(0), column(2), column(2))
    marks.settle(column(0, 1), column(8, 6), column(2, 3))
    assert marks.seen[:2].tolist() == [10, 6]
    assert ingest(marks, 9, lane=1) == 0  # nor was anything of it processed in vain
