from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import Drafts
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.sampling.draw import draw
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose
from dynaspec.sampling.state import SamplerState
from dynaspec.verify.chain import Accepted
from dynaspec.verify.synthetic import SyntheticAcceptance

VOCAB = 7
KINDS = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(seed=3))


def state_of(count: int, *kinds: SamplingParams, first_seed: int = 0) -> SamplerState:
    """Requests of these kinds in turn; lane b has seed ``first_seed`` + b."""
    state = SamplerState(count, VOCAB)
    for lane in range(count):
        params = kinds[lane % len(kinds)]
        state.add(lane, params, seed=first_seed + lane, n_index=0, eos_token_ids=[], bad_words=[], prompt=[])
    return state


def chains(lens: np.ndarray, width: int, seed: int = 0) -> tuple[torch.Tensor, Rows, Drafts]:
    """Random scores and drafts; lane b belongs to request b."""
    rng = np.random.default_rng(seed)
    request = np.repeat(np.arange(lens.size), lens + 1)
    depth = np.concatenate([np.arange(n + 1) for n in lens])
    tokens = rng.integers(0, VOCAB, (lens.size, width))
    scores = torch.from_numpy(rng.normal(size=(request.size, VOCAB)).astype(np.float32))
    return scores, Rows(request, request, depth, tokens), Drafts(tokens, lens)


def accept(rates: tuple[float, ...], lens: np.ndarray, width: int, state: SamplerState, seed: int = 0) -> Accepted:
    scores, rows, drafts = chains(lens, width, seed)
    return SyntheticAcceptance(rates).accept_chain(scores, rows, drafts, lens, state)


@pytest.mark.parametrize("kind", KINDS, ids=["greedy", "unseeded", "seeded"])
@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((0.8, 0.5, 0.5, 0.1), (0.8, 0.5, 0.5, 0.1)),
        ((0.9, 0.45), (0.9, 0.45, 0.0, 0.0)),
        ((1.0, 0.0), (1.0, 0.0, 0.0, 0.0)),
        ((0.0,), (0.0,) * 4),
        ((1.0,) * 4, (1.0,) * 4),
        ((1.0, 0.3, 0.0, 0.0, 0.0), (1.0, 0.3, 0.0, 0.0)),
    ],
    ids=str,
)
def test_the_measured_rates_are_those_asked_for(
    rates: tuple[float, ...], expected: tuple[float, ...], kind: SamplingParams
) -> None:
    count = 8000
    accepted = accept(rates, np.full(count, 4), 4, state_of(count, kind)).accepted
    for position, rate in enumerate(expected):
        found = (accepted > position).mean()
        assert abs(found - rate) <= 4.5 * np.sqrt(rate * (1 - rate) / count), (position, found)


def test_every_step_and_every_seed_has_numbers_of_its_own() -> None:
    count = 4000
    lens = np.full(count, 2)
    state = state_of(count, *KINDS)
    first = accept((0.5, 0.3), lens, 2, state).accepted
    for lane in range(count):
        state.commit(lane, [0] * (int(first[lane]) + 1))
    second = accept((0.5, 0.3), lens, 2, state).accepted
    other = accept((0.5, 0.3), lens, 2, state_of(count, *KINDS, first_seed=count)).accepted
    for column in (second, other):
        assert abs(np.corrcoef(first, column)[0, 1]) < 4.5 / np.sqrt(count)


def test_acceptance_looks_neither_at_scores_nor_at_tokens() -> None:
    lens = np.random.default_rng(5).integers(0, 5, 300)
    found = [accept((0.7, 0.5, 0.4, 0.1), lens, 4, state_of(300, *KINDS), seed=seed) for seed in (1, 2)]
    np.testing.assert_array_equal(found[0].accepted, found[1].accepted)
    assert (found[0].tokens != found[1].tokens).any()


def test_emitted_are_the_drafts_and_the_targets_own_token_of_the_row_reached() -> None:
    lens = np.random.default_rng(6).integers(0, 5, 200)
    state = state_of(200, *KINDS)
    scores, rows, drafts = chains(lens, 4)
    result = SyntheticAcceptance((0.8, 0.7, 0.6, 0.5)).accept_chain(scores, rows, drafts, lens, state)
    own = draw(scores, rows, state, Purpose.TARGET)[0].numpy()
    assert (result.accepted <= lens).all()
    assert 0 < result.accepted.sum() < lens.sum()
    for b, (accepted, tokens) in enumerate(zip(result.accepted, result.tokens, strict=True)):
        (row,) = np.flatnonzero((rows.request == b) & (rows.depth == accepted))
        expected = [*drafts.tokens[b, :accepted], own[row]]
        assert tokens.tolist() == expected + [0] * (5 - len(expected))


def test_a_request_gets_in_any_batch_what_it_gets_alone() -> None:
    lens = np.random.default_rng(7).integers(0, 5, 60)
    state = state_of(60, *KINDS)
    scores, rows, drafts = chains(lens, 4)
    synthetic = SyntheticAcceptance((0.8, 0.5, 0.4))
    together = synthetic.accept_chain(scores, rows, drafts, lens, state)
    for b in range(60):
        index = np.flatnonzero(rows.request == b)
        own = Drafts(drafts.tokens[b : b + 1], lens[b : b + 1])
        mine = Rows(rows.lanes[index], np.zeros_like(index), rows.depth[index], own.tokens)
        alone = synthetic.accept_chain(scores[index], mine, own, own.lens, state)
        assert alone.accepted[0] == together.accepted[b]
        assert alone.tokens[0].tolist() == together.tokens[b].tolist()


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((), "rates are empty; expected at least one"),
        ((0.5, 1.1), r"position 1 is 1.1; expected a number from 0 to 1"),
        ((-0.1,), r"position 0 is -0.1; expected"),
        ((float("nan"),), r"position 0 is nan; expected"),
        ((0.9, 0.5, 0.6), r"position 2 is 0.6 after 0.5; expected no rate above"),
    ],
    ids=str,
)
def test_impossible_rates_are_refused(rates: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SyntheticAcceptance(rates)
