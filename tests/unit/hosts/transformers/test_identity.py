"""Greedy output is the target's own, whatever is decided about drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dynaspec.hosts.transformers import Session
from support.controllers import VaryingController
from unit.hosts.transformers.driving import decide_with, ours, plain
from unit.hosts.transformers.pairs import Models

PROFILE = Path(__file__).parents[2] / "control" / "online_profile.json"
POLICIES: dict[str, Any] = {
    "auto": None,
    "constant": {"policy": "constant", "num_assistant_tokens": 4},
    "heuristic": {"num_assistant_tokens_schedule": "heuristic", "num_assistant_tokens": 3},
    "heuristic_transient": {"num_assistant_tokens_schedule": "heuristic_transient"},
    "confidence": {"policy": "confidence"},
    "confidence_dsl": {"draft_confidence_threshold": 0.5},
    "confidence_fitted": {"draft_confidence_threshold": "auto"},
    "schedule": {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 8, 1]]},
    "goodput": {"policy": "goodput", "dynamic_config_path": str(PROFILE)},
    "elastic": {"policy": "elastic", "num_speculative_tokens": 6},
    "off_above": {"policy": "constant", "num_speculative_tokens": 3, "disable_by_batch_size": 1},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_targets_text(decoder: Models, policy: str) -> None:
    output, counts = ours(decoder, POLICIES[policy])
    assert torch.equal(output, plain(decoder))
    assert counts.drafts > 0
    assert counts.accepted > 0


def test_every_kind_of_model(models: Models) -> None:
    output, counts = ours(models)
    assert torch.equal(output, plain(models))
    assert counts.accepted > 0


@pytest.mark.parametrize("seed", range(3))
def test_lengths_stops_and_trims_that_vary(models: Models, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without drafts among them, so that the assistant has to catch up."""
    decide_with(monkeypatch, lambda limits: VaryingController(limits, seed=seed))
    output, counts = ours(models, {"num_assistant_tokens": 6})
    assert torch.equal(output, plain(models))
    assert 0 < counts.drafts < counts.steps
    assert counts.verified < counts.draft_tokens  # trimmed
    assert counts.accepted > 0


@pytest.mark.parametrize("seed", range(2))
def test_a_padded_prompt(decoder: Models, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decide_with(monkeypatch, lambda limits: VaryingController(limits, seed=seed))
    mask = torch.ones_like(decoder.inputs)
    mask[0, :3] = 0
    output, counts = ours(decoder, attention_mask=mask)
    assert torch.equal(output, plain(decoder, attention_mask=mask))
    assert counts.accepted > 0


def test_an_assistant_that_always_agrees_reads_every_token_once(decoder: Models) -> None:
    config = {"policy": "constant", "num_assistant_tokens": 5}
    output, counts = ours(decoder, config, assistant_model=decoder.target)
    assert torch.equal(output, plain(decoder))
    assert counts.accepted == counts.verified == counts.draft_tokens
    assert counts.steps == 7  # 40 tokens, 6 a step


@pytest.mark.parametrize("config", [None, {"policy": "constant"}], ids=["auto", "constant"])
def test_lookup_by_transformers_rule(looping: Models, config: Any) -> None:
    repeating = {"no_repeat_ngram_size": 0, "max_new_tokens": 60}
    output, counts = ours(looping, config, assistant_model=None, prompt_lookup_num_tokens=5, **repeating)
    assert torch.equal(output, plain(looping, **repeating))
    assert counts.drafter_passes == 0
    assert counts.accepted > 0
    assert len(counts.drafted_per_pos) <= 5


@pytest.mark.parametrize("policy", ["auto", "constant"])
def test_lookup_by_ours(looping: Models, policy: str) -> None:
    repeating = {"no_repeat_ngram_size": 0, "max_new_tokens": 60}
    config = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "policy": policy}
    output, counts = ours(looping, config, assistant_model=None, **repeating)
    assert torch.equal(output, plain(looping, **repeating))
    assert counts.accepted > 0


@pytest.mark.parametrize("policy", ["auto", "constant"])
def test_suffix_trees(looping: Models, policy: str) -> None:
    repeating = {"no_repeat_ngram_size": 0, "max_new_tokens": 60}
    output, counts = ours(looping, {"method": "suffix", "policy": policy}, assistant_model=None, **repeating)
    assert torch.equal(output, plain(looping, **repeating))
    assert counts.accepted > 0
    assert counts.drafter_passes == 0


def test_suffix_trees_know_the_answers_of_a_session(decoder: Models) -> None:
    config, found = {"method": "suffix", "policy": "constant"}, []
    with Session() as session:
        for _ in range(2):
            output, counts = ours(decoder, config, assistant_model=None, session=session)
            assert torch.equal(output, plain(decoder))
            found.append(counts.steps)
    assert found[1] < 0.5 * found[0]  # no two tokens occur twice in the text itself


@pytest.mark.parametrize("who", ["the call", "the configuration"])
def test_early_exit(who: str, decoder: Models) -> None:
    layers = {"assistant_early_exit": 1}
    config, call = ({}, layers) if who == "the call" else (layers, {})
    output, counts = ours(decoder, {"policy": "constant", **config}, assistant_model=None, **call)
    assert torch.equal(output, plain(decoder))
    assert counts.drafts > 0
    assert decoder.target.config.num_hidden_layers == 2


def test_what_generate_takes_beside_is_passed_on(decoder: Models) -> None:
    """Scores, a streamer, a stopping criterion, and the length limits."""
    from transformers import MaxLengthCriteria, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    class Collected(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Collected()
    options = {"return_dict_in_generate": True, "output_scores": True, "min_new_tokens": 12}
    output, _ = ours(decoder, streamer=streamer, **options)
    expected = plain(decoder, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert len(output.scores) == len(expected.scores)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(output.scores, expected.scores, strict=True))
    assert streamer.tokens == output.sequences[0].tolist()
    assert streamer.ended
    short, _ = ours(decoder, {"policy": "constant", "num_assistant_tokens": 2}, max_new_tokens=7)
    assert short.shape[1] == decoder.inputs.shape[1] + 7
    criteria = StoppingCriteriaList([MaxLengthCriteria(decoder.inputs.shape[1] + 9)])
    stopped, _ = ours(decoder, {"policy": "constant", "num_assistant_tokens": 2}, stopping_criteria=criteria)
    theirs = decoder.target.generate(
        decoder.inputs, stopping_criteria=criteria, max_new_tokens=40, do_sample=False, no_repeat_ngram_size=2
    )
    assert theirs.shape[1] <= stopped.shape[1] <= theirs.shape[1] + 2
