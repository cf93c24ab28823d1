from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.contract.errors import IntegrityError, RequestError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose
from dynaspec.sampling.state import SamplerState
from unit.sampling.oracle import process_row

VOCAB = 24
EOS = [3]
INF = float("inf")


def process(
    params: SamplingParams,
    logits: torch.Tensor,
    *,
    prompt: list[int],
    output: list[int],
    drafted: list[int],
    bad_words: list[list[int]] | None = None,
) -> torch.Tensor:
    """Scores of all depths of one request, whose lane is not its index."""
    state = SamplerState(5, VOCAB)
    state.add(
        3,
        params,
        seed=0,
        n_index=0,
        eos_token_ids=EOS,
        bad_words=bad_words or [],
        prompt=prompt,
        output=output,
    )
    depth = np.arange(len(drafted) + 1)
    rows = Rows(np.full_like(depth, 3), np.zeros_like(depth), depth, np.array([drafted], np.int64))
    return state.process(logits, rows)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "tiny temperature": {"temperature": 1e-30},
    "greedy ignores temperature and truncation": {"temperature": 0.0, "top_k": 2, "top_p": 0.5, "min_p": 0.5},
    "allowed": {"allowed_token_ids": [1, 5, 7, 7]},
    "min tokens": {"min_tokens": 5, "stop_token_ids": [8, 9]},
    "min tokens with ignore_eos": {"min_tokens": 5, "ignore_eos": True},
    "bias": {"logit_bias": {2: 4.5, 11: -100.0}},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": -0.6},
    "all penalties, greedy": {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
    },
    "min_p": {"min_p": 0.2},
    "top_k": {"top_k": 4},
    "top_k of more than there are": {"top_k": 500},
    "top_p": {"top_p": 0.6},
    "tiny top_p keeps one": {"top_p": 1e-6},
    "truncation together": {"temperature": 1.6, "min_p": 0.02, "top_k": 9, "top_p": 0.8},
    "everything": {
        "temperature": 1.3,
        "allowed_token_ids": list(range(20)),
        "min_tokens": 6,
        "logit_bias": {4: 2.0, 21: 50.0, 3: 90.0},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "min_p": 0.01,
        "top_k": 12,
        "top_p": 0.9,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_processors_agree_with_the_oracle_at_every_depth(case: str) -> None:
    rng = np.random.default_rng(len(case))
    params = SamplingParams(max_tokens=50, **CASES[case])
    for _ in range(10):
        drafted = rng.integers(0, VOCAB, 4).tolist()
        drafted[2] = drafted[0]
        prompt, output = rng.integers(0, VOCAB, 6).tolist(), rng.integers(0, VOCAB, 4).tolist()
        bad_words = [[5], [drafted[0], 6], [output[-1], *drafted[:2], 7], [1, 2, 3, 4]]
        logits = torch.from_numpy(rng.normal(0, 2, (5, VOCAB)).astype(np.float32))
        context = {"prompt": prompt, "bad_words": bad_words}
        scores = process(params, logits, output=output, drafted=drafted, **context)
        for depth in range(5):
            expected = process_row(logits[depth].tolist(), params, output=output + drafted[:depth], eos=EOS, **context)
            np.testing.assert_allclose(scores[depth], expected, rtol=3e-6, atol=3e-6)


def test_min_tokens_counts_drafted_tokens() -> None:
    params = SamplingParams(min_tokens=3)
    scores = process(params, torch.zeros(4, VOCAB), prompt=[1], output=[1], drafted=[1, 1, 1])
    assert torch.isinf(scores[:, EOS[0]]).tolist() == [True, True, False, False]


def test_penalties_forget_rejected_drafts() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    state = SamplerState(1, VOCAB)
    state.add(0, params, seed=0, n_index=0, eos_token_ids=EOS, bad_words=[], prompt=[1])
    column = np.zeros(1, np.int64)
    logits = torch.zeros(1, VOCAB)
    state.process(logits, Rows(column, column, column + 3, np.array([[7, 7, 9]])))
    state.commit(0, [7, 4])
    scores = state.process(logits, Rows(column, column, column, np.array([[9, 9, 9]])))
    assert {int(i): scores[0, i].item() for i in scores[0].nonzero()} == {4: -1.0, 7: -1.0}


def test_prompt_counts_for_the_repetition_penalty_only() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    scores = process(params, torch.ones(1, VOCAB), prompt=[6], output=[9, 9], drafted=[])
    assert scores[0, 6].item() == 0.5
    assert scores[0, 9].item() == 0.5 - 2 * 0.25 - 0.5


def test_nothing_to_do_returns_the_very_logits() -> None:
    logits = torch.randn(3, VOCAB)
    kwargs: dict[str, Any] = {"prompt": [1], "output": [], "drafted": [1, 2]}
    assert process(SamplingParams(temperature=0.0, top_k=3), logits, **kwargs) is logits
    assert process(SamplingParams(seed=1), logits, **kwargs) is logits


def test_logits_are_never_changed() -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    params = SamplingParams(**CASES["everything"], max_tokens=50)
    process(params, logits, prompt=[1], output=[2], drafted=[3], bad_words=[[1]])
    assert torch.equal(logits, before)


def test_a_lane_taken_again_keeps_nothing_of_its_last_request() -> None:
    state = SamplerState(1, VOCAB)
    params = SamplingParams(**CASES["everything"], max_tokens=50)
    common: dict[str, Any] = {"seed": 0, "n_index": 0, "eos_token_ids": EOS}
    state.add(0, params, bad_words=[[1]], prompt=[1], output=[2, 3], **common)
    state.remove(0)
    state.add(0, SamplingParams(temperature=0.0), bad_words=[], prompt=[1], **common)
    logits = torch.randn(1, VOCAB)
    column = np.zeros(1, np.int64)
    assert state.process(logits, Rows(column, column, column, np.zeros((1, 0), np.int64))) is logits
    assert state.output_len[0] == 0


def test_coming_back_after_preemption_is_the_same_as_having_stayed() -> None:
    params = SamplingParams(**CASES["everything"], max_tokens=50, seed=1)
    common: dict[str, Any] = {"seed": 1, "n_index": 2, "eos_token_ids": EOS, "bad_words": [[4, 5], [6, 4, 9]]}
    state = SamplerState(2, VOCAB)
    state.add(0, params, prompt=[1, 2], **common)
    for tokens in ([4], [7, 6], [4]):
        state.commit(0, tokens)
    state.add(1, params, prompt=[1, 2], output=[4, 7, 6, 4], **common)
    column = np.array([0, 1])
    rows = Rows(column, column, np.array([1, 1]), np.array([[9], [9]]))
    scores = state.process(torch.randn(1, VOCAB).repeat(2, 1), rows)
    assert torch.equal(scores[0], scores[1])
    assert len(set(state.keys(rows, column, Purpose.TARGET).tolist())) == 1


def test_padded_logits_are_welcome_and_narrow_ones_refused() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={VOCAB - 1: 2.0})
    kwargs: dict[str, Any] = {"prompt": [1], "output": [], "drafted": [1]}
    scores = process(params, torch.zeros(2, VOCAB + 5), **kwargs)
    assert scores.nonzero().tolist() == [[0, VOCAB - 1], [1, VOCAB - 1]]
    with pytest.raises(IntegrityError, match="logits are 23 wide; expected at least 24"):
        process(params, torch.zeros(2, VOCAB - 1), **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "bad_words", "message"),
    [
        ({"allowed_token_ids": [VOCAB]}, [], "allowed_token_ids holds token 24; expected ids from 0 to 23"),
        ({"logit_bias": {99: 1.0}}, [], "logit_bias holds token 99"),
        ({}, [[1, -1]], "bad_words holds token -1"),
        ({"allowed_token_ids": [3], "min_tokens": 1}, [], "forbid every allowed token"),
        ({"allowed_token_ids": [5, 6]}, [[5], [6]], "forbid every allowed token"),
    ],
)
def test_impossible_rules_are_refused(kwargs: dict[str, Any], bad_words: list[list[int]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        process(SamplingParams(**kwargs), torch.zeros(1, VOCAB), prompt=[1], output=[], drafted=[], bad_words=bad_words)
