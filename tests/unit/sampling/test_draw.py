from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.sampling import accelerator, ops
from dynaspec.sampling.draw import draw
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose
from dynaspec.sampling.state import SamplerState

VOCAB = 50


def state_of(*params: SamplingParams, seeds: list[int] | None = None, n_index: int = 0) -> SamplerState:
    state = SamplerState(len(params), VOCAB)
    for lane, one in enumerate(params):
        seed = seeds[lane] if seeds else lane
        state.add(lane, one, seed=seed, n_index=n_index, eos_token_ids=[], bad_words=[], prompt=[])
    return state


def rows_of(count: int, depth: int = 0) -> Rows:
    lanes = np.arange(count)
    return Rows(lanes, lanes, np.full(count, depth), np.zeros((count, 4), np.int64))


def test_greedy_takes_the_lowest_of_equals() -> None:
    scores = torch.zeros(2, VOCAB)
    scores[0, [9, 4, 30]] = 1.0
    tokens, q = draw(scores, rows_of(2), state_of(*[SamplingParams(temperature=0.0)] * 2), Purpose.TARGET)
    assert tokens.tolist() == [4, 0]
    assert q is None


def test_tokens_outside_the_support_are_never_drawn() -> None:
    count = 300
    scores = torch.full((count, VOCAB), -torch.inf)
    scores[:, [3, 41]] = 0.0
    state = state_of(*[SamplingParams()] * count)
    tokens, _ = draw(scores, rows_of(count), state, Purpose.TARGET)
    assert set(tokens.tolist()) == {3, 41}


def test_a_row_without_support_draws_token_0() -> None:
    scores = torch.full((2, VOCAB), -torch.inf)
    state = state_of(SamplingParams(), SamplingParams(temperature=0.0))
    assert draw(scores, rows_of(2), state, Purpose.TARGET)[0].tolist() == [0, 0]


def test_a_row_of_nan_is_survived() -> None:
    scores = torch.full((1, VOCAB), torch.nan)
    assert 0 <= draw(scores, rows_of(1), state_of(SamplingParams()), Purpose.TARGET)[0][0] < VOCAB


def test_seeded_drafts_share_the_targets_noise_and_unseeded_ones_do_not() -> None:
    count = 100
    scores = torch.zeros(count, VOCAB)
    for seeded in (True, False):
        state = state_of(*[SamplingParams(seed=1 if seeded else None)] * count)
        draft, q = draw(scores, rows_of(count, depth=2), state, Purpose.DRAFT)
        target, _ = draw(scores, rows_of(count, depth=2), state, Purpose.TARGET)
        assert float((draft == target).float().mean()) == (1.0 if seeded else pytest.approx(0.02, abs=0.05))
        assert (q is None) == seeded


def test_output_depends_on_seed_continuation_and_position_only() -> None:
    scores = torch.zeros(1, VOCAB)
    params = SamplingParams(seed=5)

    def token(depth: int, committed: int, n_index: int = 0, seed: int = 5) -> int:
        state = state_of(params, seeds=[seed], n_index=n_index)
        state.commit(0, [1] * committed)
        return int(draw(scores, rows_of(1, depth), state, Purpose.TARGET)[0][0])

    assert len({token(depth, 4 - depth) for depth in range(5)}) == 1
    assert len({token(0, n) for n in range(12)}) > 6
    assert len({token(0, 0, n_index=n) for n in range(12)}) > 6
    assert len({token(0, 0, seed=n) for n in range(12)}) > 6


def test_q_is_the_softmax_of_the_scores_of_requests_that_need_it() -> None:
    scores = torch.randn(3, VOCAB)
    scores[:, 10:20] = -torch.inf
    state = state_of(SamplingParams(), SamplingParams(temperature=0.0), SamplingParams())
    _, q = draw(scores, rows_of(3), state, Purpose.DRAFT)
    assert q is not None
    torch.testing.assert_close(q[[0, 2]], scores.softmax(-1)[[0, 2]])


def test_torch_draws_the_same_tokens() -> None:
    scores = torch.randn(40, 700) * 3
    scores[:, ::7] = -torch.inf
    index = np.arange(40)
    keys = index.astype(np.uint64)
    p = ops.softmax(scores, index)
    torch.testing.assert_close(accelerator.softmax(scores), p)
    theirs = accelerator.race(p, torch.from_numpy(keys.view(np.int64)))
    assert theirs.tolist() == ops.race(p, keys).tolist()


def test_softmax_of_an_empty_row_is_zero_on_all_devices() -> None:
    scores = torch.full((1, VOCAB), -torch.inf)
    assert ops.softmax(scores, np.zeros(1, np.int64)).sum() == 0
    assert accelerator.softmax(scores).sum() == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
def test_softmax_is_accurate(scale: float) -> None:
    scores = torch.randn(5, 1003, generator=torch.Generator().manual_seed(0)) * scale
    ours = ops.softmax(scores, np.array([4, 1]))
    torch.testing.assert_close(ours, scores[[4, 1]].double().softmax(-1).float(), rtol=3e-7, atol=1e-37)
