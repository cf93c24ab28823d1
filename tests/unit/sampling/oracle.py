"""The processors once more, one row at a time in plain Python: slow, and meant to be read beside the real ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dynaspec.contract.sampling_params import SamplingParams

MINUS_INFINITY = -math.inf


def process_row(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[float]:
    """Scores of the token that follows ``output``."""
    scores = [float(x) for x in logits]
    if params.allowed_token_ids is not None:
        scores = [x if i in params.allowed_token_ids else MINUS_INFINITY for i, x in enumerate(scores)]
    for word in bad_words:
        before = list(word[:-1])
        if list(output)[len(output) - len(before) :] == before and len(before) <= len(output):
            scores[word[-1]] = MINUS_INFINITY
    if len(output) < params.min_tokens:
        for token in (*eos, *(params.stop_token_ids or ())):
            scores[token] = MINUS_INFINITY
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    scores = [_penalise(x, i, params, prompt, output) for i, x in enumerate(scores)]
    if params.greedy:
        return scores
    scores = [float(np.float32(x) / np.float32(max(params.temperature, 0.01))) for x in scores]
    return _truncate(scores, params)


def probabilities(scores: Sequence[float]) -> list[float]:
    """Softmax."""
    top = max(scores)
    weights = [math.exp(x - top) for x in scores]
    return [w / math.fsum(weights) for w in weights]


def _penalise(score: float, token: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> float:
    if token in prompt or token in output:
        score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
    count = list(output).count(token)
    return score - params.frequency_penalty * count - (params.presence_penalty if count else 0.0)


def _truncate(scores: list[float], params: SamplingParams) -> list[float]:
    if params.min_p > 0:
        limit = max(scores) + math.log(params.min_p)
        scores = [x if x >= limit else MINUS_INFINITY for x in scores]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    kept = order[: params.top_k] if params.top_k > 0 else order
    if params.top_p < 1:
        top = scores[kept[0]]
        weights = [math.exp(scores[i] - top) for i in kept]
        limit = params.top_p * math.fsum(weights)
        kept = [i for n, i in enumerate(kept) if math.fsum(weights[:n]) < limit]
    return [x if i in set(kept) else MINUS_INFINITY for i, x in enumerate(scores)]
