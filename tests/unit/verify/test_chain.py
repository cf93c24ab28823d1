from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.contract.proposer import Drafts
from dynaspec.contract.sampling_params import SamplingParams, StructuredOutputsParams
from dynaspec.sampling.draw import draw
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose
from dynaspec.sampling.state import SamplerState
from dynaspec.verify.chain import accept_chain, residual
from support.letters import letters_grammar

VOCAB = 12
GREEDY = SamplingParams(temperature=0.0)
UNSEEDED = SamplingParams()


def state_of(*params: SamplingParams) -> SamplerState:
    state = SamplerState(len(params), VOCAB)
    for lane, one in enumerate(params):
        state.add(lane, one, seed=lane, n_index=0, eos_token_ids=[], bad_words=[], prompt=[])
    return state


def chains(tokens: list[list[int]], lens: list[int]) -> tuple[Rows, Drafts, np.ndarray]:
    """Rows of all requests' chains; lane b belongs to request b."""
    table = np.array(tokens, np.int64).reshape(len(lens), -1)
    request = np.repeat(np.arange(len(lens)), np.array(lens) + 1)
    depth = np.concatenate([np.arange(n + 1) for n in lens])
    return Rows(request, request, depth, table), Drafts(table, np.array(lens)), np.array(lens)


def one_hot(tokens: list[int], value: float = 20.0) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB) * value


def test_greedy_accepts_the_agreeing_prefix_and_adds_the_targets_token() -> None:
    rows, drafts, lens = chains([[1, 2, 3], [1, 2, 3], [9, 2, 3], [4, 0, 0]], [3, 3, 3, 1])
    scores = one_hot([1, 2, 3, 4, 1, 7, 3, 4, 1, 2, 3, 4, 4, 5])
    result = accept_chain(scores, rows, drafts, lens, state_of(*[GREEDY] * 4))
    assert result.accepted.tolist() == [3, 1, 0, 1]
    assert result.tokens.tolist() == [[1, 2, 3, 4], [1, 7, 0, 0], [1, 0, 0, 0], [4, 5, 0, 0]]


def test_greedy_requests_get_the_same_tokens_alone_and_among_others() -> None:
    """Alone they are told from their largest scores at once; beside a sampled request by the general way."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        lens = [int(n) for n in rng.integers(0, 4, 5)]
        table = [[int(t) for t in rng.integers(0, 3, 3)] for _ in lens]
        rows, drafts, tested = chains(table, lens)
        scores = torch.from_numpy(rng.normal(size=(len(rows.depth), VOCAB)).astype(np.float32))
        scores[:, :3] += 3.0  # so that some drafts are accepted
        alone = accept_chain(scores, rows, drafts, tested, state_of(*[GREEDY] * 5))
        rows, drafts, tested = chains([*table, [0, 0, 0]], [*lens, 0])
        beside = torch.cat([scores, torch.zeros(1, VOCAB)])
        among = accept_chain(beside, rows, drafts, tested, state_of(*[GREEDY] * 5, UNSEEDED))
        assert alone.accepted.tolist() == among.accepted[:5].tolist()
        assert alone.tokens.tolist() == among.tokens[:5].tolist()
        assert not alone.dead_end.any()
        assert not alone.refused.any()
        assert not among.refused.any()


def test_tokens_behind_the_verified_length_do_not_count() -> None:
    rows, drafts, lens = chains([[1, 2, 3]], [1])
    result = accept_chain(one_hot([1, 2]), rows, drafts, lens, state_of(GREEDY))
    assert result.accepted.tolist() == [1]
    assert result.tokens.tolist() == [[1, 2, 0, 0]]


def test_without_drafts_it_is_plain_decoding() -> None:
    for params in (GREEDY, UNSEEDED, SamplingParams(seed=3)):
        rows, drafts, lens = chains([[], []], [0, 0])
        state = state_of(params, params)
        scores = torch.randn(2, VOCAB)
        result = accept_chain(scores, rows, drafts, lens, state)
        assert result.accepted.tolist() == [0, 0]
        assert result.tokens[:, 0].tolist() == draw(scores, rows, state, Purpose.TARGET)[0].tolist()


def test_equal_distributions_accept_everything() -> None:
    rows, drafts, lens = chains([[1, 2]] * 50, [2] * 50)
    scores = torch.zeros(150, VOCAB)
    drafts.q = torch.full((50, 2, VOCAB), 1 / VOCAB)
    assert (accept_chain(scores, rows, drafts, lens, state_of(*[UNSEEDED] * 50)).accepted == 2).all()


def test_impossible_tokens_are_rejected_whatever_q_says() -> None:
    count = 200
    rows, drafts, lens = chains([[5]] * count, [1] * count)
    scores = torch.zeros(2 * count, VOCAB)
    scores[:, 5] = -torch.inf
    for q in (None, one_hot([5] * count, 1.0)[:, None].float(), torch.zeros(count, 1, VOCAB)):
        drafts.q = q
        result = accept_chain(scores, rows, drafts, lens, state_of(*[UNSEEDED] * count))
        assert (result.accepted == 0).all()
        assert not (result.tokens == 5).any()


def test_a_certain_token_is_accepted() -> None:
    rows, drafts, lens = chains([[5]] * 100, [1] * 100)
    scores = torch.full((200, VOCAB), -torch.inf)
    scores[:, 5] = 0.0
    assert (accept_chain(scores, rows, drafts, lens, state_of(*[UNSEEDED] * 100)).accepted == 1).all()


def test_residual_is_what_q_lacks_and_p_where_nothing_is_left() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.0, 1.0, 0.0]])
    q = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.0, 1.0, 0.0]])
    tokens = np.array([0, 2, 1])
    torch.testing.assert_close(residual(p, q, tokens), torch.tensor([[0.0, 0.1, 0.1], [0.5, 0.3, 0.2], [0, 1, 0]]))
    expected = torch.tensor([[0.0, 0.3, 0.2], [0.5, 0.3, 0.0], [0, 1, 0]])
    torch.testing.assert_close(residual(p, None, tokens), expected)


def test_requests_of_all_kinds_in_one_batch_get_what_they_get_alone() -> None:
    kinds = [GREEDY, UNSEEDED, SamplingParams(seed=8), UNSEEDED, GREEDY, SamplingParams(seed=9)] * 4
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    lens = rng.integers(0, 4, len(kinds)).tolist()
    tokens = rng.integers(0, VOCAB, (len(kinds), 3)).tolist()
    rows, drafts, lens_column = chains(tokens, lens)
    scores = torch.randn(len(rows.lanes), VOCAB, generator=generator)
    drafts.q = torch.rand(len(kinds), 3, VOCAB, generator=generator).softmax(-1)
    state = state_of(*kinds)
    together = accept_chain(scores, rows, drafts, lens_column, state)
    for b in range(len(kinds)):
        index = np.flatnonzero(rows.request == b)
        alone = accept_chain(
            scores[index],
            Rows(rows.lanes[index], np.zeros_like(index), rows.depth[index], drafts.tokens[b : b + 1]),
            Drafts(drafts.tokens[b : b + 1], drafts.lens[b : b + 1], q=drafts.q[b : b + 1]),
            lens_column[b : b + 1],
            state,
        )
        assert alone.accepted[0] == together.accepted[b]
        assert alone.tokens[0].tolist() == together.tokens[b].tolist()


FORMED = [
    SamplingParams(structured_outputs=StructuredOutputsParams(regex="a[bc]d"), **options)
    for options in ({"temperature": 0.0}, {"seed": 1}, {}, {"allowed_token_ids": [0, 1]})
]


def formed_state() -> SamplerState:
    state = SamplerState(len(FORMED), VOCAB)
    grammar = letters_grammar(StructuredOutputsParams(regex="a[bc]d"))
    for lane, one in enumerate(FORMED):
        state.add(lane, one, seed=lane, n_index=0, eos_token_ids=[5], bad_words=[], prompt=[], grammar=grammar)
    return state


@pytest.mark.parametrize("sampled", [False, True], ids=["certain drafts", "drawn drafts"])
def test_what_a_grammar_refuses_is_told_from_what_the_target_rejects(sampled: bool) -> None:
    """Drafts: one that is refused first, one second, one that is merely improbable, one accepted up to a dead end."""
    state = formed_state()
    rows, drafts, lens = chains([[1, 1, 3], [0, 0, 3], [0, 1, 3], [0, 1, 0]], [3, 3, 3, 3])
    if sampled:
        drafts.q = torch.full((4, 3, VOCAB), 1 / VOCAB)
    logits = one_hot([2] * 16)  # c, wherever the grammar lets it
    accepted = accept_chain(state.process(logits, rows), rows, drafts, lens, state)
    assert accepted.accepted.tolist() == [0, 1, 1, 2]
    assert accepted.refused.tolist() == [True, True, False, True]
    assert accepted.dead_end.tolist() == [False, False, False, True]
    assert [accepted.tokens[i, n] for i, n in enumerate((0, 1, 1))] == [0, 2, 2]


def test_token_0_is_not_accepted_where_there_is_none() -> None:
    """Drawing from nothing gives 0, on both sides."""
    for params in (GREEDY, SamplingParams(seed=1), UNSEEDED):
        allowed = SamplingParams(temperature=params.temperature, seed=params.seed, allowed_token_ids=[0])
        state = SamplerState(1, VOCAB)
        state.add(0, allowed, seed=1, n_index=0, eos_token_ids=[], bad_words=[[0, 0]], prompt=[])
        rows, drafts, lens = chains([[0, 0, 0]], [3])
        accepted = accept_chain(state.process(torch.zeros(4, VOCAB), rows), rows, drafts, lens, state)
        assert (accepted.accepted.tolist(), accepted.dead_end.tolist()) == ([1], [True])
        assert state.grammars.dead_end(0, [0]).finish_reason == "error"
