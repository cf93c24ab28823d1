"""Sampled output: that of Transformers' assisted generation, draw for draw where lengths are the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from dynaspec.hosts.transformers import Session, generate
from support.controllers import VaryingController
from unit.hosts.transformers.driving import decide_with, ours
from unit.hosts.transformers.pairs import END, Models, llama

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "no_repeat_ngram_size": 0}
LENGTH = 4
DRAWS = 400


def theirs(models: Models, seed: int, threshold: float, **options: Any) -> torch.Tensor:
    """Transformers' assisted generation with a constant length."""
    settings = models.assistant.generation_config
    before = settings.num_assistant_tokens, settings.assistant_confidence_threshold
    settings.num_assistant_tokens, settings.assistant_confidence_threshold = LENGTH, threshold
    torch.manual_seed(seed)
    try:
        return models.target.generate(models.inputs, assistant_model=models.assistant, max_new_tokens=40, **options)
    finally:
        settings.num_assistant_tokens, settings.assistant_confidence_threshold = before


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_gives_what_transformers_gives_with_the_same_lengths(decoder: Models, seed: int) -> None:
    expected = theirs(decoder, seed, 0.0, **SAMPLED)
    torch.manual_seed(seed)
    output, counts = ours(decoder, {"policy": "constant", "num_assistant_tokens": LENGTH}, **SAMPLED)
    assert torch.equal(output, expected)
    assert 0 < counts.accepted < counts.verified


@pytest.mark.parametrize("seed", range(2))
def test_processors_are_the_assistants_too(decoder: Models, seed: int) -> None:
    options = SAMPLED | {"repetition_penalty": 1.5, "min_new_tokens": 20, "no_repeat_ngram_size": 2}
    expected = theirs(decoder, seed, 0.0, **options)
    torch.manual_seed(seed)
    output, _ = ours(decoder, {"policy": "constant", "num_assistant_tokens": LENGTH}, **options)
    assert torch.equal(output, expected)


def test_a_threshold_stops_where_transformers_stops(decoder: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would move its threshold, if scikit-learn were there."""
    monkeypatch.setattr("transformers.generation.candidate_generator.is_sklearn_available", lambda: False)
    expected = theirs(decoder, 5, 0.3, **SAMPLED)
    torch.manual_seed(5)
    config = {"assistant_confidence_threshold": 0.3, "num_assistant_tokens": LENGTH}
    output, counts = ours(decoder, config, **SAMPLED)
    assert torch.equal(output, expected)
    assert counts.early_exits > 0


def test_the_distribution_is_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two of some tokens, with lengths, stops and trims of all kinds, against the target's probabilities."""
    decide_with(monkeypatch, lambda limits: VaryingController(limits, seed=1))
    models = llama(seed=3, vocab=12)
    torch.manual_seed(0)
    session, seen = Session(), Counter[tuple[int, ...]]()
    for _ in range(DRAWS):
        output = generate(
            models.target,
            models.inputs,
            assistant_model=models.assistant,
            session=session,
            speculative_config={"num_assistant_tokens": 3},
            do_sample=True,
            max_new_tokens=5,
            top_k=0,
        )
        start = models.inputs.shape[1]
        seen[tuple(output[0, start : start + 2].tolist())] += 1
    assert session.stats.snapshot().accepted > DRAWS // 4
    expected = {pair: DRAWS * chance for pair, chance in _chances(models).items()}
    common = [pair for pair, count in expected.items() if count >= 8]
    rest = DRAWS - sum(expected[pair] for pair in common)
    squares = sum((seen[pair] - expected[pair]) ** 2 / expected[pair] for pair in common)
    squares += (DRAWS - sum(seen[pair] for pair in common) - rest) ** 2 / rest
    assert squares < len(common) + 4 * (2 * len(common)) ** 0.5  # χ² with that many degrees of freedom


def _chances(models: Models) -> dict[tuple[int, ...], float]:
    """Of the two tokens after the prompt; of the end alone."""
    chances: dict[tuple[int, ...], float] = {}
    for first, chance in enumerate(_next(models, models.inputs)):
        if first == END:
            chances[(first,)] = chance
            continue
        text = torch.cat([models.inputs, torch.tensor([[first]])], dim=-1)
        chances |= {(first, second): chance * then for second, then in enumerate(_next(models, text))}
    return chances


@torch.no_grad()
def _next(models: Models, text: torch.Tensor) -> list[float]:
    chances: list[float] = models.target(text).logits[0, -1].softmax(-1).tolist()
    return chances
