"""Engines whose target came in the format of compressed-tensors: it says what its numbers say, with drafts too."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import compressed
from support.checkpoints import Pair
from support.controllers import VaryingController
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.workloads import PROMPTS

from .test_int8 import params_of, speculation


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_drafts_change_nothing(bits: int, symmetric: bool, tiny: Pair, tmp_path: Path) -> None:
    """With preemption, chunked prefill and every decision that a controller can take."""
    path, _ = compressed.save(Path(tiny.target), tmp_path, bits, None, symmetric)
    params, memory = params_of("mixed"), kv_bytes(9, str(path), tiny.drafter)
    plain = PlainDecoding(str(path))
    with open_llm(
        str(path),
        controller=lambda limits: VaryingController(limits, seed=1),
        speculative_config=speculation(tiny.drafter, policy="auto"),
        max_num_seqs=8,
        max_num_batched_tokens=16,
        async_scheduling=True,
        kv_cache_memory=memory,
    ) as llm:
        assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        stats = llm.stats()
    plain.llm.close()
    assert stats.verified > stats.accepted > 0
    assert stats.preemptions > 0
    assert stats.proposer_faults == 0


def test_a_drafter_in_w4a16(tiny: Pair, plain: PlainDecoding, tmp_path: Path) -> None:
    path, _ = compressed.save(Path(tiny.drafter), tmp_path, 4, None)
    params = params_of("mixed")
    with open_llm(tiny.target, speculative_config=speculation(str(path))) as llm:
        assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        assert llm.stats().accepted > 0
