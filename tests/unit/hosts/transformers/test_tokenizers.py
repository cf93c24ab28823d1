"""An assistant with another vocabulary (universal assisted decoding)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Controller, Limits
from support.controllers import VaryingController
from unit.hosts.transformers.driving import decide_with, ours, plain
from unit.hosts.transformers.pairs import END, VOCAB, Models, llama

EXTRA = 8


@dataclass(frozen=True, slots=True)
class Universal:
    models: Models
    tokenizers: dict[str, Any]


@pytest.fixture
def universal() -> Universal:
    """The assistant's vocabulary has some words more. Sampling prunes its head, so it is made anew for every test."""
    made = llama()
    made.target.resize_token_embeddings(VOCAB)
    assistant = copy.deepcopy(made.assistant)
    assistant.resize_token_embeddings(VOCAB + EXTRA, mean_resizing=False)
    with torch.no_grad():
        assistant.lm_head.weight[VOCAB:] = 0.0
    pair = Models(made.target, assistant, made.inputs)
    return Universal(pair, {"tokenizer": words(VOCAB), "assistant_tokenizer": words(VOCAB + EXTRA)})


def words(count: int) -> PreTrainedTokenizerFast:
    """A tokenizer of ``count`` words, from which text and tokens follow from each other."""
    vocabulary = {"<unknown>": 0, "<end>": END} | {f"w{i}": i for i in range(2, count)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>", eos_token="<end>")


Build = Callable[[Limits], Controller]


@pytest.mark.parametrize("config", [None, {"policy": "constant", "num_assistant_tokens": 4}, {"policy": "confidence"}])
def test_greedy_output_is_the_targets(universal: Universal, config: Any) -> None:
    output, counts = ours(universal.models, config, **universal.tokenizers)
    assert torch.equal(output, plain(universal.models))
    assert counts.accepted > 0


@pytest.mark.parametrize("seed", range(3))
def test_steps_without_drafts(universal: Universal, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decide_with(monkeypatch, lambda limits: VaryingController(limits, seed=seed))
    output, counts = ours(universal.models, {"num_assistant_tokens": 5}, **universal.tokenizers)
    assert torch.equal(output, plain(universal.models))
    assert 0 < counts.drafts < counts.steps
    assert counts.accepted > 0


def test_sampling(universal: Universal, monkeypatch: pytest.MonkeyPatch) -> None:
    decide_with(monkeypatch, lambda limits: VaryingController(limits, seed=4))
    torch.manual_seed(0)
    output, counts = ours(
        universal.models, do_sample=True, top_k=10, temperature=0.5, no_repeat_ngram_size=0, **universal.tokenizers
    )
    assert output.shape[1] > universal.models.inputs.shape[1]
    assert counts.accepted > 0


def test_what_needs_the_fate_of_the_assistants_tokens_is_refused(universal: Universal) -> None:
    with pytest.raises(ConfigError, match="has another tokenizer"):
        ours(universal.models, {"draft_confidence_threshold": "auto"}, **universal.tokenizers)


def test_missing_tokenizers_are_refused_as_transformers_does(universal: Universal) -> None:
    with pytest.raises(ValueError, match="Please provide `tokenizer` and `assistant_tokenizer`"):
        ours(universal.models)
