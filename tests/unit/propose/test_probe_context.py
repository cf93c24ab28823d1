"""One token from the latest tokens of a request that the drafter has not followed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unit.engine.fakes import FakeModel, plain_decode, text_hash
from unit.propose.batches import BLOCK
from unit.propose.test_draft_model import Desk, rows


def next_token(text: list[int], first: int) -> int:
    """After the tokens from ``first`` on alone, at their true positions."""
    state = text_hash(np.array(text[first:]), np.arange(first, len(text)))[-1:]
    return int(FakeModel().logits(torch.from_numpy(state.astype(np.float32))[:, None]).argmax())


def test_a_glimpse_reads_the_latest_tokens_alone_and_drafts_one() -> None:
    desk = Desk(100)
    drafts = desk.propose(4, probe_context=32)
    first = 80  # the first block in the last 32
    assert [read.tokens for reads in desk.model.reads for read in reads] == [desk.texts[0][first:]]
    assert drafts.tokens.tolist() == [[next_token(desk.texts[0], first)]]
    assert drafts.rows_per_pass == (20,)


@pytest.mark.parametrize(
    ("probe_context", "read"), [(1, 8), (20, 8), (24, 24), (25, 24), (100, 88), (104, 104), (200, 104)]
)
def test_it_begins_with_a_block(probe_context: int, read: int) -> None:
    desk = Desk(104)
    assert BLOCK == 16
    desk.propose(1, probe_context=probe_context)
    assert rows(desk.model.reads[0]) == [read]


def test_afterwards_the_drafter_lacks_as_much_and_reads_all() -> None:
    desk = Desk(100)
    desk.commit(desk.propose(4, probe_context=32), 1)
    assert desk.lags == (101,)
    drafts = desk.propose(3)
    assert rows(desk.model.reads[0]) == [102]
    assert drafts.tokens[0].tolist() == plain_decode(desk.texts[0], 3)
    assert drafts.kv_redone == 0


def test_of_whom_the_drafter_lacks_less_is_read_on_and_drafts_as_many_as_wanted() -> None:
    desk = Desk(100, 100)
    desk.commit(desk.propose(3, 0), 1, 0)
    drafts = desk.propose(3, 3, probe_context=32)
    assert drafts.lens.tolist() == [3, 1]
    assert rows(desk.model.reads[0]) == [1, 101 - 80]
    assert drafts.tokens[0].tolist() == plain_decode(desk.texts[0], 3)
    assert drafts.tokens[1, 0] == next_token(desk.texts[1], 80)
    assert desk.lags == (0, 100)


def test_who_lags_by_more_than_is_read_in_a_step_drafts_too() -> None:
    desk = Desk(100, catch_up_tokens=40)
    assert desk.propose(1).skipped == {"a": "catching_up"}
    drafts = desk.propose(1, probe_context=32)
    assert (drafts.lens.tolist(), drafts.skipped) == ([1], {})


def test_blocks_that_others_read_are_left_alone() -> None:
    """The drafter's KV of them may be valid there."""
    desk = Desk(100)
    desk.tables.pool.share(desk.tables.blocks(0)[5])
    desk.propose(1, probe_context=32)
    assert rows(desk.model.reads[0]) == [100]


def test_who_does_not_draft_is_not_read() -> None:
    desk = Desk(100, 100)
    desk.propose(0, 1, probe_context=32)
    assert rows(desk.model.reads[0]) == [100 - 80]
    assert desk.lags == (99, 99)


def test_what_a_glimpse_has_written_is_offered_to_nobody() -> None:
    """Even where the drafter once had the block's own KV, as of a request that was preempted."""
    desk = Desk(100)
    desk.propose(1)
    blocks = desk.tables.blocks(0)
    desk.proposer.admit(0, (), "")
    desk.propose(1, probe_context=32)
    desk.proposer.admit(0, blocks[:6], "")
    assert desk.lags == (99 - 80,)
