"""Engines with int8 weights: speculation changes nothing about what their target says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dynaspec import LLM, SamplingParams
from dynaspec.contract.errors import ConfigError
from dynaspec.model.kernels import gemm
from dynaspec.model.packed import PackedLinear
from support.checkpoints import Pair
from support.controllers import VaryingController
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm, visible
from support.workloads import MODES, PROMPTS


def speculation(drafter: str, **options: Any) -> dict[str, Any]:
    return {"model": drafter, "policy": "constant", "num_speculative_tokens": 4, "prompt_lookup_max": 0, **options}


def params_of(mode: str) -> list[SamplingParams]:
    return [MODES[mode](i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain_int8(tiny: Pair) -> Iterator[PlainDecoding]:
    """Plain decoding with the tiny target in int8."""
    reference = PlainDecoding(tiny.target, quantization="int8")
    yield reference
    reference.llm.close()


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every matrix that is packed from here on, whether it is int8."""
    seen: list[bool] = []
    pack = PackedLinear.__init__

    def watched(self: PackedLinear, *args: Any) -> None:
        pack(self, *args)
        seen.append(self.form == gemm.INT8)

    monkeypatch.setattr(PackedLinear, "__init__", watched)
    return seen


@pytest.mark.parametrize("mode", ["greedy", "truncated", "mixed"])
def test_an_int8_drafter(mode: str, drafter: str, tiny: Pair, plain: PlainDecoding, packed: list[bool]) -> None:
    with open_llm(tiny.target, speculative_config=speculation(drafter, quantization="int8"), max_num_seqs=8) as llm:
        assert (any(packed), all(packed)) == (True, False)  # the drafter's alone
        params = params_of(mode)
        assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0
    assert stats.proposer_faults == 0


@pytest.mark.parametrize("mode", ["greedy", "truncated", "mixed"])
def test_an_int8_target_and_its_drafter(
    mode: str, drafter: str, tiny: Pair, plain_int8: PlainDecoding, packed: list[bool]
) -> None:
    """With preemption, chunked prefill and every decision that a controller can take."""
    params, memory = params_of(mode), kv_bytes(5, tiny.target, drafter)  # of float32
    packed.clear()
    with open_llm(
        tiny.target,
        controller=lambda limits: VaryingController(limits, seed=1),
        speculative_config=speculation(drafter, policy="auto"),
        quantization="int8",
        max_num_seqs=8,
        max_num_batched_tokens=16,
        async_scheduling=True,
        kv_cache_memory=memory,
    ) as llm:
        assert all(packed)
        assert packed
        assert_same(llm.generate(PROMPTS, params), plain_int8.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0
    assert stats.preemptions > 0
    assert stats.proposer_faults == 0


def test_look_ups_beside_an_int8_target(tiny: Pair, plain_int8: PlainDecoding) -> None:
    params = params_of("greedy")
    with open_llm(tiny.target, speculative_config={"method": "ngram"}, quantization="int8", max_num_seqs=4) as llm:
        assert_same(llm.generate(PROMPTS, params), plain_int8.outputs(PROMPTS, params))


def test_int8_is_another_model(plain: PlainDecoding, plain_int8: PlainDecoding) -> None:
    params = params_of("logprobs")
    found, other = plain_int8.outputs(PROMPTS, params), plain.outputs(PROMPTS, params)
    assert all(visible(one) != visible(two) for one, two in zip(found, other, strict=True))


def test_a_drafter_of_another_dtype_is_refused(tiny: Pair) -> None:
    config = speculation(tiny.drafter, dtype="float16", quantization="int8")
    with pytest.raises(ConfigError, match="quantization is 'int8' but the model runs on cpu in float16"):
        LLM(tiny.target, speculative_config=config)
