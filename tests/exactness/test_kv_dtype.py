"""Engines that keep keys and values in bfloat16: speculation changes nothing about what their target says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.checkpoints import Pair
from support.controllers import VaryingController
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm, visible
from support.state_heads import FittedHeads
from support.workloads import MODES, PROMPTS

KEPT = {"kv_cache_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def kept(tiny: Pair) -> Iterator[PlainDecoding]:
    """Plain decoding with such a cache."""
    reference = PlainDecoding(tiny.target, **KEPT)
    yield reference
    reference.llm.close()


def speculation(drafter: str, **options: Any) -> dict[str, Any]:
    return {"model": drafter, "policy": "auto", "num_speculative_tokens": 4, "prompt_lookup_max": 0, **options}


@pytest.mark.parametrize(("mode", "overlapped"), [("greedy", False), ("truncated", True), ("mixed", True)])
def test_a_drafter(mode: str, overlapped: bool, drafter: str, tiny: Pair, kept: PlainDecoding) -> None:
    """With preemption, chunked prefill and every decision that a controller can take."""
    params = [MODES[mode](i) for i in range(len(PROMPTS))]
    with open_llm(
        tiny.target,
        controller=lambda limits: VaryingController(limits, seed=1),
        speculative_config=speculation(drafter),
        max_num_seqs=8,
        max_num_batched_tokens=16,
        async_scheduling=overlapped,
        kv_cache_memory=kv_bytes(5, tiny.target, drafter),
        **KEPT,
    ) as llm:
        assert_same(llm.generate(PROMPTS, params), kept.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0
    assert stats.preemptions > 0
    assert stats.proposer_faults == 0


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "ngram", "suffix"])
def test_other_ways_of_drafting(
    method: str, tiny: Pair, kept: PlainDecoding, fitted_state_heads: dict[str, FittedHeads]
) -> None:
    found = fitted_state_heads.get(method)
    config = {"method": method} if found is None else speculation(found.path, num_speculative_tokens=2, method=method)
    params = [MODES["mixed"](i) for i in range(len(PROMPTS))]
    with open_llm(tiny.target, speculative_config=config, max_num_seqs=8, **KEPT) as llm:
        assert_same(llm.generate(PROMPTS, params), kept.outputs(PROMPTS, params))
        assert llm.stats().proposer_faults == 0


def test_a_tree(drafter: str, tiny: Pair, kept: PlainDecoding) -> None:
    """What was accepted of it is moved within the cache."""
    config = speculation(drafter, policy="constant", num_speculative_tokens=5, tree_width=3, tree_nodes=12)
    params = [MODES["truncated"](i) for i in range(len(PROMPTS))]
    with open_llm(tiny.target, speculative_config=config, max_num_seqs=8, **KEPT) as llm:
        assert_same(llm.generate(PROMPTS, params), kept.outputs(PROMPTS, params))
        assert llm.stats().accepted > 0


def test_prompts_that_are_in_the_cache(drafter: str, tiny: Pair, kept: PlainDecoding) -> None:
    params = [MODES["greedy"](i) for i in range(len(PROMPTS))]
    with open_llm(tiny.target, speculative_config=speculation(drafter), max_num_seqs=8, **KEPT) as llm:
        assert_same(llm.generate(PROMPTS, params), kept.outputs(PROMPTS, params))
        found = llm.generate(PROMPTS, params)
        assert_same(found, kept.outputs(PROMPTS, params))
        assert sum(output.num_cached_tokens for output in found) > 0


def test_int8_weights(drafter: str, tiny: Pair) -> None:
    both = {"quantization": "int8", **KEPT}
    params = [MODES["mixed"](i) for i in range(len(PROMPTS))]
    reference = PlainDecoding(tiny.target, **both)
    with open_llm(tiny.target, speculative_config=speculation(drafter), max_num_seqs=8, **both) as llm:
        assert_same(llm.generate(PROMPTS, params), reference.outputs(PROMPTS, params))
    reference.llm.close()


def test_rounding_is_seen(plain: PlainDecoding, kept: PlainDecoding) -> None:
    params = [MODES["logprobs"](i) for i in range(len(PROMPTS))]
    found, other = kept.outputs(PROMPTS, params), plain.outputs(PROMPTS, params)
    assert any(visible(one) != visible(two) for one, two in zip(found, other, strict=True))
