"""The real chat model with the head that comes along: on prompts of every kind, output is that of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from dynaspec import SamplingParams
from dynaspec.bench.decoders import SharedModels
from dynaspec.cli.demo import demo_head, demo_target
from dynaspec.contract.errors import ConfigError
from dynaspec.propose.ngram import NgramProposer
from dynaspec.propose.suffix import SuffixProposer
from support.engines import PlainDecoding, assert_same, open_llm

QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that returns True if a word is a palindrome.",
    "Anna buys 6 pens for 2 dollars each and 3 notebooks for 5 dollars each. How much does she pay?",
    "Write the first two sentences of a story about a lighthouse keeper.",
    "Translate into French: Good morning, how are you?",
    "Repeat this sentence three times: The cat sat on the mat, and looked at the moon.",
)
LENGTHS = (24, 28, 32, 24, 24, 48)
SPECULATION: dict[str, dict[str, Any]] = {
    "k=1": {"policy": "constant", "num_speculative_tokens": 1},
    "k=3": {"policy": "constant", "num_speculative_tokens": 3},
    "k=5, drawn": {"policy": "constant", "num_speculative_tokens": 5, "draft_sample_method": "probabilistic"},
    "auto": {"policy": "auto", "prompt_lookup_max": 0},
    "auto with lookup": {"policy": "auto", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "auto with suffixes": {"policy": "auto", "suffix_decoding_max_tree_depth": 24},
    "suffixes alone": {"method": "suffix", "model": None, "policy": "constant"},
}
GREEDY = [SamplingParams(temperature=0.0, max_tokens=length) for length in LENGTHS]
SEEDED = [
    SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=24, repetition_penalty=1.1 if i == 3 else 1.0)
    for i in range(len(QUESTIONS))
]


@pytest.fixture(scope="module")
def models() -> SharedModels:
    """Engines share the target."""
    return SharedModels()


@pytest.fixture(scope="module")
def chat(models: SharedModels) -> Iterator[PlainDecoding]:
    """Plain decoding with the chat model."""
    try:
        target = demo_target()
    except ConfigError as error:
        pytest.skip(str(error))
    reference = PlainDecoding(target, load=models, max_model_len=128)
    yield reference
    reference.llm.close()


@pytest.mark.parametrize("kind", SPECULATION)
def test_output_is_that_of_plain_decoding(kind: str, chat: PlainDecoding, models: SharedModels) -> None:
    render = chat.llm.tokenizer.render_chat
    prompts = [render([{"role": "user", "content": question}]) for question in QUESTIONS]
    with (
        mock.patch.object(NgramProposer, "propose", autospec=True, side_effect=NgramProposer.propose) as lookup,
        mock.patch.object(SuffixProposer, "propose", autospec=True, side_effect=SuffixProposer.propose) as suffixes,
        open_llm(
            demo_target(),
            load=models,
            ticking=kind.startswith("auto"),
            speculative_config={"method": "eagle3", "model": demo_head(), **SPECULATION[kind]},
            max_model_len=128,
            max_num_seqs=4,
            async_scheduling=kind == "k=3",
        ) as llm,
    ):
        lookup.reset_mock()  # building an engine calls them, too
        suffixes.reset_mock()
        for params in (GREEDY, SEEDED):
            before = llm.stats()
            assert_same(llm.generate(prompts, params), chat.outputs(prompts, params))
            stats = llm.stats() - before
            assert stats.verified > stats.accepted > 0
            assert stats.mean_acceptance_length is not None
            assert stats.mean_acceptance_length > 1.2
        assert llm.stats().proposer_faults == 0
    assert lookup.called == (kind == "auto with lookup")
    assert suffixes.called == ("suffixes" in kind)
