"""Draft trees of suffix decoding: outputs are those of plain decoding, bit for bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from dynaspec.propose.suffix import SuffixProposer
from support.checkpoints import Pair
from support.engines import PlainDecoding, assert_same, open_llm
from support.state_heads import FittedHeads
from support.workloads import MODES, PROMPTS

TREES: dict[str, Any] = {
    "method": "suffix",
    "tree_width": 3,
    "tree_nodes": 12,
    "num_speculative_tokens": 4,
    "suffix_decoding_max_spec_factor": 4.0,
    "suffix_decoding_min_token_prob": 0.02,
}


@pytest.mark.parametrize("scheduling", ["serial", "async"])
@pytest.mark.parametrize("mode", ["greedy", "truncated", "formed", "mixed"])
def test_output_is_that_of_plain_decoding(mode: str, scheduling: str, tiny: Pair, plain: PlainDecoding) -> None:
    prompts, params = PROMPTS[:4], [MODES[mode](i) for i in range(4)]
    drafts: list[Any] = []
    propose = SuffixProposer.propose

    def kept(*args: Any) -> Any:
        drafts.append(propose(*args))
        return drafts[-1]

    with (
        mock.patch.object(SuffixProposer, "propose", kept),
        open_llm(tiny.target, speculative_config=TREES, max_num_seqs=4, async_scheduling=scheduling == "async") as llm,
    ):
        expected = plain.outputs(prompts, params)
        for _ in range(2):  # then there are answers to draft from
            assert_same(llm.generate(prompts, params), expected)
        stats = llm.stats()
    assert stats.proposer_faults == 0
    assert stats.verified > stats.accepted > 0
    branched = [len({*row[:n].tolist()}) < n for d in drafts for row, n in zip(d.parents, d.lens, strict=True)]
    assert any(branched)


def test_auto_takes_paths_beside_heads_that_draft_trees(
    tiny: Pair, fitted_state_heads: dict[str, FittedHeads], plain: PlainDecoding
) -> None:
    prompts, params = PROMPTS[:4], [MODES["greedy"](i) for i in range(4)]
    config = {"model": fitted_state_heads["medusa"].path, "policy": "auto", "suffix_decoding_max_tree_depth": 12}
    drafts: list[Any] = []
    propose = SuffixProposer.propose

    def kept(*args: Any) -> Any:
        drafts.append(propose(*args))
        return drafts[-1]

    with (
        mock.patch.object(SuffixProposer, "propose", kept),
        open_llm(tiny.target, ticking=True, speculative_config=config, max_num_seqs=4) as llm,
    ):
        expected = plain.outputs(prompts, params)
        for _ in range(3):
            assert_same(llm.generate(prompts, params), expected)
        assert llm.stats().proposer_faults == 0
    assert sum(int(d.lens.sum()) for d in drafts) > 0
    assert all(d.parents is None for d in drafts)
