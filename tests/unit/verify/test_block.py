from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.contract.proposer import Drafts
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.state import SamplerState
from dynaspec.verify.chain import Accepted, BlockVerification, accept_chain
from unit.verify.test_chain import GREEDY, UNSEEDED, VOCAB, chains, formed_state, one_hot, state_of

SEEDED = SamplingParams(seed=3)


def in_blocks(scores: torch.Tensor, rows: Rows, drafts: Drafts, lens: np.ndarray, state: SamplerState) -> Accepted:
    return accept_chain(scores, rows, drafts, lens, state, BlockVerification)


def drawn(params: list[SamplingParams], seed: int = 0) -> tuple[torch.Tensor, Rows, Drafts, np.ndarray, SamplerState]:
    """Chains of 0 … 3 tokens and a q that fits them badly."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    lens = rng.integers(0, 4, len(params)).tolist()
    rows, drafts, column = chains(rng.integers(0, VOCAB, (len(params), 3)).tolist(), lens)
    drafts.q = torch.randn(len(params), 3, VOCAB, generator=generator).softmax(-1)
    return torch.randn(len(rows.lanes), VOCAB, generator=generator), rows, drafts, column, state_of(*params)


def test_what_is_greedy_seeded_or_not_drawn_is_verified_as_ever() -> None:
    params = [GREEDY, UNSEEDED, SEEDED] * 40
    scores, rows, drafts, lens, state = drawn(params)
    blocks, one_by_one = (accept(scores, rows, drafts, lens, state) for accept in (in_blocks, accept_chain))
    exact = np.array([one is not UNSEEDED for one in params])
    np.testing.assert_array_equal(blocks.accepted[exact], one_by_one.accepted[exact])
    np.testing.assert_array_equal(blocks.tokens[exact], one_by_one.tokens[exact])
    assert (blocks.tokens != one_by_one.tokens).any()
    drafts.q = None
    blocks, one_by_one = (accept(scores, rows, drafts, lens, state) for accept in (in_blocks, accept_chain))
    np.testing.assert_array_equal(blocks.accepted, one_by_one.accepted)
    np.testing.assert_array_equal(blocks.tokens, one_by_one.tokens)


def test_requests_get_alone_what_they_get_among_others() -> None:
    params = [UNSEEDED, GREEDY, SEEDED, UNSEEDED] * 6
    scores, rows, drafts, lens, state = drawn(params, seed=1)
    together = in_blocks(scores, rows, drafts, lens, state)
    assert drafts.q is not None
    for b in range(len(params)):
        index = np.flatnonzero(rows.request == b)
        own = drafts.tokens[b : b + 1]
        alone = in_blocks(
            scores[index],
            Rows(rows.lanes[index], np.zeros_like(index), rows.depth[index], own),
            Drafts(own, drafts.lens[b : b + 1], q=drafts.q[b : b + 1]),
            lens[b : b + 1],
            state,
        )
        assert alone.accepted[0] == together.accepted[b]
        assert alone.tokens[0].tolist() == together.tokens[b].tolist()


def test_rows_may_come_in_any_order() -> None:
    scores, rows, drafts, lens, state = drawn([UNSEEDED] * 30)
    order = np.random.default_rng(0).permutation(len(rows.lanes))
    ordered, mixed = (
        in_blocks(scores[index], rows.take(index), drafts, lens, state) for index in (np.arange(order.size), order)
    )
    np.testing.assert_array_equal(ordered.tokens, mixed.tokens)


def test_equal_distributions_accept_everything() -> None:
    rows, drafts, lens = chains([[1, 2, 3]] * 50, [3] * 50)
    drafts.q = torch.full((50, 3, VOCAB), 1 / VOCAB)
    assert (in_blocks(torch.zeros(200, VOCAB), rows, drafts, lens, state_of(*[UNSEEDED] * 50)).accepted == 3).all()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_the_target_cannot_say_is_never_accepted(place: int) -> None:
    """Nor anything behind it, whatever q says."""
    count, tokens = 200, [1, 2, 3]
    rows, drafts, lens = chains([tokens] * count, [3] * count)
    scores = torch.zeros(4 * count, VOCAB)
    scores[place::4, tokens[place]] = -torch.inf
    sure = torch.stack([one_hot([token] * count, 1.0) for token in tokens], 1)
    for q in (sure, torch.zeros(count, 3, VOCAB), torch.full((count, 3, VOCAB), 1 / VOCAB)):
        drafts.q = q
        result = in_blocks(scores, rows, drafts, lens, state_of(*[UNSEEDED] * count))
        assert result.accepted.max() <= place
        stopped = result.accepted == place
        assert not (result.tokens[stopped, place] == tokens[place]).any()
    assert stopped.mean() > 0.3


def test_a_token_that_the_target_likes_better_makes_up_for_one_that_it_likes_less() -> None:
    """Token 1 is half as likely as the drafter has it, token 2 behind it twice as likely: together they are certain."""
    count = 400
    p, q = torch.zeros(3, VOCAB), torch.zeros(2, VOCAB)
    p[0, [1, 4]], q[0, [1, 4]] = 0.5, torch.tensor([1.0, 0.0])
    p[1, [2, 5]], q[1, [2, 5]] = torch.tensor([1.0, 0.0]), 0.5
    p[2, 7] = 1.0
    rows, drafts, lens = chains([[1, 2]] * count, [2] * count)
    drafts.q = q.expand(count, 2, VOCAB)
    state = state_of(*[UNSEEDED] * count)
    scores = p.log().repeat(count, 1)
    assert (in_blocks(scores, rows, drafts, lens, state).accepted == 2).all()
    one_by_one = accept_chain(scores, rows, drafts, lens, state).accepted
    assert 0.4 < np.mean(one_by_one == 2) < 0.6


def test_what_a_grammar_refuses_and_dead_ends_are_told() -> None:
    """The drafts of the same test of ``accept_chain``."""
    state = formed_state()
    rows, drafts, lens = chains([[1, 1, 3], [0, 0, 3], [0, 1, 3], [0, 1, 0]], [3, 3, 3, 3])
    drafts.q = torch.full((4, 3, VOCAB), 1 / VOCAB)
    logits = one_hot([2] * 16)  # c, wherever the grammar lets it
    accepted = in_blocks(state.process(logits, rows), rows, drafts, lens, state)
    assert accepted.accepted.tolist() == [0, 1, 1, 2]
    assert accepted.refused.tolist() == [True, True, False, True]
    assert accepted.dead_end.tolist() == [False, False, False, True]


def test_a_chain_ends_at_a_dead_end() -> None:
    """Token 0 is all that is allowed, and not twice: what is tested behind that counts for nothing."""
    count = 100
    state = SamplerState(count, VOCAB)
    for lane in range(count):
        allowed = SamplingParams(allowed_token_ids=[0])
        state.add(lane, allowed, seed=lane, n_index=0, eos_token_ids=[], bad_words=[[0, 0]], prompt=[])
    rows, drafts, lens = chains([[0, 0, 0]] * count, [3] * count)
    drafts.q = torch.full((count, 3, VOCAB), 1 / VOCAB)
    accepted = in_blocks(state.process(torch.zeros(4 * count, VOCAB), rows), rows, drafts, lens, state)
    assert accepted.accepted.tolist() == [1] * count
    assert accepted.dead_end.all()
