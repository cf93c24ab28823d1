"""The bits of a row's result depend on that row alone: the base of identical output with and without drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.sampling.draw import draw
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose
from dynaspec.sampling.state import SamplerState

PARAMS = (
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9, top_k=30),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(temperature=1.4, min_p=0.01, top_p=0.97, presence_penalty=0.5, logit_bias={5: 2.0}),
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3, allowed_token_ids=list(range(0, 300, 3)), min_tokens=9),
)
LANES = 40


@pytest.mark.parametrize("vocab", [509, 512])
def test_a_row_alone_equals_the_row_in_any_batch(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    state, drafts = _state(vocab), np.random.default_rng(0).integers(0, vocab, (LANES, 3))
    logits = torch.randn(LANES, vocab, generator=generator) * 4
    lanes = np.arange(LANES)
    rows = Rows(lanes, lanes, lanes % 4, drafts)
    alone = [_run(logits[r : r + 1].clone(), rows.take(lanes[r : r + 1]), state) for r in range(LANES)]
    for size in (2, 3, 7, 16, 39, 40):
        for start in (0, 1, LANES - size):
            index = (lanes[:size] + start) % LANES
            scores, tokens, q = _run(logits[index], rows.take(index), state)
            for place, r in enumerate(index):
                assert torch.equal(scores[place], alone[r][0][0])
                assert tokens[place] == alone[r][1][0]
                if not state.exact(rows.lanes[[r]])[0]:
                    assert torch.equal(q[place], alone[r][2][0])


def _state(vocab: int) -> SamplerState:
    state = SamplerState(LANES, vocab)
    for lane in range(LANES):
        state.add(
            lane,
            PARAMS[lane % len(PARAMS)],
            seed=lane,
            n_index=0,
            eos_token_ids=[0],
            bad_words=[[7, 8], [9]] if lane % 5 == 0 else [],
            prompt=range(lane),
            output=[3, 7],
        )
    return state


def _run(logits: torch.Tensor, rows: Rows, state: SamplerState) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = state.process(logits, rows)
    tokens, q = draw(scores, rows, state, Purpose.DRAFT)
    return scores, tokens, q
