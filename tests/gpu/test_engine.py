"""Greedy speculative output on CUDA is plain output, except where two logits are equal but for rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynaspec import LLM, SamplingParams
from dynaspec.contract.outputs import CompletionOutput
from support.checkpoints import VOCAB, Pair, save_pair

PROMPTS = 16
TOKENS = 48
TIE = {"float32": 1e-4, "bfloat16": 0.1}
"""Logarithmic probabilities closer than this are equal but for rounding."""
MOST_TIES = {"float32": 0, "bfloat16": PROMPTS // 2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("pair"))


def decode(target: str, dtype: str, speculative_config: dict[str, Any] | None) -> list[CompletionOutput]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB, length).tolist() for length in rng.integers(2, 120, PROMPTS)]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    llm = LLM(
        model=target,
        speculative_config=speculative_config,
        device="cuda",
        dtype=dtype,
        max_num_seqs=8,
        kv_cache_memory=2**26,
    )
    try:
        outputs = llm.generate(prompts, params)
        llm.verify_integrity()
        return [output.outputs[0] for output in outputs]
    finally:
        llm.close()


def margin(output: CompletionOutput, position: int) -> float:
    """By how much the best token led at a position, in logarithmic probability."""
    assert output.logprobs is not None
    best, second = sorted((entry.logprob for entry in output.logprobs[position].values()), reverse=True)[:2]
    return best - second


@pytest.mark.parametrize("dtype", TIE)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_greedy_output_is_that_of_plain_decoding(pair: Pair, dtype: str, method: str) -> None:
    own = {"ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3}, "draft_model": {"model": pair.drafter}}[method]
    speculative = {"method": method, "policy": "constant", "num_speculative_tokens": 4, **own}
    plain = decode(pair.target, dtype, None)
    found = decode(pair.target, dtype, speculative)
    ties = 0
    for expected, output in zip(plain, found, strict=True):
        pairs = zip(expected.token_ids, output.token_ids, strict=True)
        split = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if split is not None:
            assert margin(expected, split) < TIE[dtype]
            ties += 1
    assert ties <= MOST_TIES[dtype]
    assert sum(output.metrics.drafted for output in found) > 0
