"""Engines that multiply in bfloat16, or keep keys and values in it: speculation changes nothing about what their target
says, on any path of the kernels that this processor has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dynaspec.model.kernels import amx, gemm
from dynaspec.model.kernels.simd import HAS_DOT
from dynaspec.model.packed import PackedLinear
from support.checkpoints import Pair
from support.controllers import VaryingController
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm, visible
from support.state_heads import FittedHeads
from support.workloads import MODES, PROMPTS

PATHS = {"float32": gemm.FLOAT32, "rounded": gemm.ROUNDED, "dot": gemm.DOT, "tiles": gemm.TILES}
AVAILABLE = ["rounded", *["dot"] * HAS_DOT, *["tiles"] * amx.available()]


class Path:
    """One way of multiplying and of keeping: what models use while it is current, and plain decoding with it."""

    def __init__(self, name: str, plain: PlainDecoding, options: dict[str, Any]) -> None:
        self.arithmetic = PATHS[name]
        self.plain = plain
        self.options = options


WAYS = [
    *((name, {"dtype": "bfloat16", "kv_cache_dtype": "float32"}) for name in AVAILABLE),
    *(("float32", {"kv_cache_dtype": "bfloat16", "quantization": form}) for form in (None, "int8")),
    *(("float32", {"kv_cache_dtype": "float32", "quantization": form}) for form in ("int8", "int4")),
    (AVAILABLE[-1], {"dtype": "bfloat16"}),
]


@pytest.fixture(scope="module", params=WAYS, ids=str)
def path(request: pytest.FixtureRequest, tiny: Pair) -> Iterator[Path]:
    name, options = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "best_arithmetic", lambda: PATHS[name])
        reference = PlainDecoding(tiny.target, **options)
        yield Path(name, reference, options)
        reference.llm.close()


def speculation(drafter: str, **options: Any) -> dict[str, Any]:
    return {"model": drafter, "policy": "auto", "num_speculative_tokens": 4, "prompt_lookup_max": 0, **options}


@pytest.mark.parametrize("mode", ["greedy", "truncated", "mixed"])
def test_a_drafter(mode: str, drafter: str, tiny: Pair, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With preemption, chunked prefill and every decision that a controller can take."""
    blocks = 9 if path.options.get("kv_cache_dtype") == "float32" else 5  # of float32: there are up to twice as many
    memory = kv_bytes(blocks, tiny.target, drafter)
    seen = set()
    pack = PackedLinear.__init__

    def watched(self: PackedLinear, *args: Any) -> None:
        pack(self, *args)
        seen.add(self.arithmetic)

    monkeypatch.setattr(PackedLinear, "__init__", watched)
    params = [MODES[mode](i) for i in range(len(PROMPTS))]
    with open_llm(
        tiny.target,
        controller=lambda limits: VaryingController(limits, seed=1),
        speculative_config=speculation(drafter),
        max_num_seqs=8,
        max_num_batched_tokens=16,
        async_scheduling=True,
        kv_cache_memory=memory,
        **path.options,
    ) as llm:
        assert seen == {path.arithmetic}
        assert_same(llm.generate(PROMPTS, params), path.plain.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0
    assert stats.preemptions > 0
    assert stats.proposer_faults == 0


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "ngram", "suffix"])
def test_other_ways_of_drafting(
    method: str, tiny: Pair, path: Path, fitted_state_heads: dict[str, FittedHeads]
) -> None:
    found = fitted_state_heads.get(method)
    config = {"method": method} if found is None else speculation(found.path, num_speculative_tokens=2, method=method)
    params = [MODES["mixed"](i) for i in range(len(PROMPTS))]
    with open_llm(tiny.target, speculative_config=config, max_num_seqs=8, **path.options) as llm:
        assert_same(llm.generate(PROMPTS, params), path.plain.outputs(PROMPTS, params))
        assert llm.stats().proposer_faults == 0


def test_a_tree(drafter: str, tiny: Pair, path: Path) -> None:
    config = speculation(drafter, policy="constant", num_speculative_tokens=5, tree_width=3, tree_nodes=12)
    params = [MODES["truncated"](i) for i in range(len(PROMPTS))]
    with open_llm(tiny.target, speculative_config=config, max_num_seqs=8, **path.options) as llm:
        assert_same(llm.generate(PROMPTS, params), path.plain.outputs(PROMPTS, params))
        assert llm.stats().accepted > 0


def test_prompts_that_are_in_the_cache(drafter: str, tiny: Pair, path: Path) -> None:
    params = [MODES["greedy"](i) for i in range(len(PROMPTS))]
    with open_llm(tiny.target, speculative_config=speculation(drafter), max_num_seqs=8, **path.options) as llm:
        assert_same(llm.generate(PROMPTS, params), path.plain.outputs(PROMPTS, params))
        found = llm.generate(PROMPTS, params)
        assert_same(found, path.plain.outputs(PROMPTS, params))
        assert sum(output.num_cached_tokens for output in found) > 0


def test_bfloat16_is_another_model(plain: PlainDecoding, path: Path) -> None:
    params = [MODES["logprobs"](i) for i in range(len(PROMPTS))]
    found, other = path.plain.outputs(PROMPTS, params), plain.outputs(PROMPTS, params)
    assert all(visible(one) != visible(two) for one, two in zip(found, other, strict=True))


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=str)
def test_a_draft_model_in_float16(options: dict[str, str], tiny: Pair) -> None:
    """Its KV cache is in its own dtype, whatever the target's is in."""
    params = [MODES["mixed"](i) for i in range(len(PROMPTS))]
    plain = PlainDecoding(tiny.target, **options)
    config = speculation(tiny.drafter, dtype="float16", policy="constant")
    with open_llm(tiny.target, speculative_config=config, max_num_seqs=8, **options) as llm:
        assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        stats = llm.stats()
    plain.llm.close()
    assert stats.accepted > 0
    assert stats.proposer_faults == 0
