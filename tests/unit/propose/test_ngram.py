from __future__ import annotations

from dynaspec.propose.guard import NoProposer
from dynaspec.propose.ngram import NgramProposer
from unit.propose.batches import batch, plan


def test_what_followed_last_time_is_drafted() -> None:
    proposer = NgramProposer(1, 3)
    texts = batch([1, 2, 3, 4, 5, 1, 2], [6, 7, 6], [1, 2, 3], [4, 4])
    drafts = proposer.propose(texts, plan(4, 4, 4, 0))
    assert drafts.lens.tolist() == [4, 2, 0, 0]
    assert drafts.tokens.tolist() == [[3, 4, 5, 1], [7, 6, 0, 0], [0] * 4, [0] * 4]
    assert drafts.skipped == {"c": "no_match"}
    assert (drafts.q, drafts.confidence, drafts.rows_per_pass) == (None, None, ())


def test_depths_are_kept() -> None:
    drafts = NgramProposer(1, 3).propose(batch([1, 2, 3, 4, 1], [1, 2, 3, 4, 1]), plan(1, 3))
    assert drafts.lens.tolist() == [1, 3]
    assert drafts.tokens.tolist() == [[2, 0, 0], [2, 3, 4]]


def test_shorter_matches_than_the_least_are_none() -> None:
    assert NgramProposer(2, 3).propose(batch([1, 2, 9, 2]), plan(3)).lens.tolist() == [0]
    assert NgramProposer(2, 3).propose(batch([1, 2, 9, 1, 2]), plan(3)).lens.tolist() == [3]


def test_offers_tell_match_length_and_tokens() -> None:
    proposer = NgramProposer(1, 3)
    texts = batch([1, 2, 3, 4, 1, 2], [1, 2], [5] * 200)
    offers = proposer.peek(texts)
    assert offers.found.tolist() == [[2, 4], [0, 0], [3, 64]]
    assert offers.tokens[0, :4].tolist() == [3, 4, 1, 2]
    assert offers.tokens[2].tolist() == [5] * 64
    assert proposer.lag(texts) == (0, 0, 0)


def test_lanes_need_not_be_those_of_the_columns() -> None:
    drafts = NgramProposer(1, 2).propose(batch([1, 2, 1], [8, 9, 8], lanes=[3, 1]), plan(1, 1))
    assert drafts.tokens.tolist() == [[2], [9]]


def test_no_speculation_drafts_nothing() -> None:
    drafts = NoProposer().propose(batch([1, 1], [2, 2]), plan(0, 0))
    assert (drafts.tokens.shape, drafts.lens.tolist()) == ((2, 0), [0, 0])
    assert (NoProposer().peek(batch([1])), NoProposer().lag(batch([1]))) == (None, (0,))
