"""Engines with int4 weights: speculation changes nothing about what their target says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.checkpoints import Pair
from support.controllers import VaryingController
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm, visible
from support.workloads import PROMPTS

from .test_int8 import params_of, speculation


@pytest.fixture(scope="module")
def plain_int4(tiny: Pair) -> Iterator[PlainDecoding]:
    """Plain decoding with the tiny target in int4."""
    reference = PlainDecoding(tiny.target, quantization="int4")
    yield reference
    reference.llm.close()


def test_an_int4_drafter(drafter: str, tiny: Pair, plain: PlainDecoding) -> None:
    with open_llm(tiny.target, speculative_config=speculation(drafter, quantization="int4"), max_num_seqs=8) as llm:
        params = params_of("mixed")
        assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0
    assert stats.proposer_faults == 0


@pytest.mark.parametrize("mode", ["greedy", "mixed"])
def test_an_int4_target_and_its_drafter(mode: str, drafter: str, tiny: Pair, plain_int4: PlainDecoding) -> None:
    """With preemption, chunked prefill and every decision that a controller can take."""
    params, memory = params_of(mode), kv_bytes(5, tiny.target, drafter)  # of float32
    with open_llm(
        tiny.target,
        controller=lambda limits: VaryingController(limits, seed=1),
        speculative_config=speculation(drafter, policy="auto"),
        quantization="int4",
        max_num_seqs=8,
        max_num_batched_tokens=16,
        async_scheduling=True,
        kv_cache_memory=memory,
    ) as llm:
        assert_same(llm.generate(PROMPTS, params), plain_int4.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0
    assert stats.preemptions > 0
    assert stats.proposer_faults == 0


def test_int4_is_another_model(plain: PlainDecoding, plain_int4: PlainDecoding) -> None:
    params = params_of("logprobs")
    found, other = plain_int4.outputs(PROMPTS, params), plain.outputs(PROMPTS, params)
    assert all(visible(one) != visible(two) for one, two in zip(found, other, strict=True))
