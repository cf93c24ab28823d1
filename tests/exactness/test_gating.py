"""Gating the drafter's KV writes, and drafters side by side, change no output, with real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynaspec import SamplingParams
from support.checkpoints import Pair, save_pair
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.workloads import MODES, PROMPTS

MODELS = Path(__file__).parents[1] / "models"
TEXTS = (
    "def quicksort(items):\n",
    "Question: Tom has 3 apples and buys 5 more. How many apples does he have?\nAnswer:",
    "The capital of France is",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n",
)
LENGTHS = {
    "fixed": {"policy": "constant", "num_speculative_tokens": 6},
    "off and on": {
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 3, 0], [4, 4, 4]],
    },
}


@pytest.fixture(scope="module")
def shipped() -> PlainDecoding:
    return PlainDecoding(str(MODELS / "target"), max_model_len=256)


@pytest.mark.parametrize("gate", [0.3, 0.7, 1.0])
def test_the_shipped_pair(gate: float, shipped: PlainDecoding) -> None:
    speculation = {"model": str(MODELS / "draft"), "kv_write_gating_threshold": gate, **LENGTHS["fixed"]}
    with open_llm(shipped.llm.config.model, speculative_config=speculation, max_model_len=256, max_num_seqs=3) as llm:
        greedy = [SamplingParams(temperature=0.0, max_tokens=40) for _ in TEXTS]
        assert_same(llm.generate(TEXTS, greedy), shipped.outputs(TEXTS, greedy))
        seeded = [SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=40) for i in range(len(TEXTS))]
        assert_same(llm.generate(TEXTS, seeded), shipped.outputs(TEXTS, seeded))
        stats = llm.stats()
    assert stats.kv_skipped > stats.kv_redone > 0
    assert stats.accepted > stats.kv_redone


@pytest.mark.parametrize("memory", ["ample", "tight"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("gate", [0.3, 0.7, 1.0])
def test_random_models(gate: float, lengths: str, memory: str, tiny: Pair, plain: PlainDecoding) -> None:
    speculation = {"model": tiny.drafter, "kv_write_gating_threshold": gate, **LENGTHS[lengths]}
    options: dict[str, Any] = {"max_num_seqs": 4, "async_scheduling": gate == 0.7}
    if memory == "tight":
        options["kv_cache_memory"] = kv_bytes(8, tiny.target, tiny.drafter)
    with open_llm(tiny.target, speculative_config=speculation, **options) as llm:
        for mode in ("greedy", "truncated", "greedy_penalised"):
            params = [MODES[mode](i) for i in range(len(PROMPTS))]
            assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.kv_skipped > 0
    assert stats.proposer_faults == 0
    assert (stats.preemptions > 0) == (memory == "tight")
    if gate == 1.0:
        assert stats.kv_redone > 0


def test_a_drafter_with_a_sliding_window(tmp_path: Path) -> None:
    """Places in its KV and positions differ by more and more, and the window slides over both."""
    pair = save_pair(tmp_path, "mistral")
    reference = PlainDecoding(pair.target)
    speculation = {"model": pair.drafter, "kv_write_gating_threshold": 0.6, **LENGTHS["fixed"]}
    params = [MODES["greedy"](i) for i in range(len(PROMPTS))]
    with open_llm(pair.target, speculative_config=speculation, max_num_seqs=4) as llm:
        assert_same(llm.generate(PROMPTS, params), reference.outputs(PROMPTS, params))
        assert llm.stats().kv_redone > 0
    reference.llm.close()


def test_lookup_beside_a_draft_model(shipped: PlainDecoding) -> None:
    speculation = {"model": str(MODELS / "draft"), "prompt_lookup_max": 3, "policy": "auto"}
    with open_llm(shipped.llm.config.model, speculative_config=speculation, max_model_len=256, max_num_seqs=3) as llm:
        for mode in ("greedy", "truncated"):
            params = [MODES[mode](i) for i in range(len(TEXTS))]
            assert_same(llm.generate(TEXTS, params), shipped.outputs(TEXTS, params))
        assert llm.stats().proposer_faults == 0
