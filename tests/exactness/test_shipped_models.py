"""The repository's own models on real prompts: speculation changes no output, and is worth having."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynaspec import SamplingParams
from support.engines import PlainDecoding, assert_same, open_llm

MODELS = Path(__file__).parents[1] / "models"
TARGET, DRAFT = MODELS / "target", MODELS / "draft"
PROMPTS = (
    "def quicksort(items):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\ndef main():\n",
    "Question: Tom has 3 apples and buys 5 more. How many apples does he have?\nAnswer:",
    "Question: A train travels 60 miles an hour for 2 hours. How far does it go?\nAnswer:",
    "The capital of France is",
    "Once upon a time there was a small village at the foot of a mountain.",
    "To make a cup of tea, first",
    "# Returns the largest of three numbers.\ndef largest(a, b, c):\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n",
    "User: What is the difference between a list and a tuple?\nAssistant:",
    "SELECT name, age FROM users WHERE",
)
SPECULATION: dict[str, dict[str, Any]] = {
    "auto": {"model": str(DRAFT), "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "constant": {"model": str(DRAFT), "policy": "constant", "num_speculative_tokens": 5},
    "confidence": {"model": str(DRAFT), "num_speculative_tokens": 8, "draft_confidence_threshold": 0.4},
    "ngram": {
        "method": "ngram",
        "policy": "constant",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
}
MODES: dict[str, Callable[[int], SamplingParams]] = {
    "greedy": lambda i: SamplingParams(temperature=0.0, max_tokens=32),
    "seeded": lambda i: SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=32),
}


@pytest.fixture(scope="module")
def shipped() -> Iterator[PlainDecoding]:
    reference = PlainDecoding(str(TARGET), max_model_len=256)
    yield reference
    reference.llm.close()


@pytest.mark.parametrize("scheduling", ["serial", "async"])
@pytest.mark.parametrize("kind", SPECULATION)
def test_output_is_that_of_plain_decoding(kind: str, scheduling: str, shipped: PlainDecoding) -> None:
    with open_llm(
        str(TARGET),
        speculative_config=SPECULATION[kind],
        max_model_len=256,
        max_num_seqs=8,
        async_scheduling=scheduling == "async",
        ticking=kind == "auto",
    ) as llm:
        for mode in MODES.values():
            params = [mode(i) for i in range(len(PROMPTS))]
            before = llm.stats()
            assert_same(llm.generate(PROMPTS, params), shipped.outputs(PROMPTS, params))
            stats = llm.stats() - before
            assert stats.verified > stats.accepted > 0
            assert stats.mean_acceptance_length is not None
            assert stats.mean_acceptance_length > 1.2
