"""Every model family, as target and as drafter: sliding windows, biases and positions survive speculation."""

from __future__ import annotations

import pytest

from support.checkpoints import FAMILIES, VOCAB, save_pair
from support.engines import PlainDecoding, assert_same, open_llm
from support.proposers import ScriptedProposer
from support.workloads import MODES, PROMPTS


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_that_of_plain_decoding(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = save_pair(tmp_path_factory.mktemp(family), family)
    plain = PlainDecoding(pair.target)
    params = [MODES[mode](i) for i, mode in enumerate(("greedy", "truncated", "logprobs", "greedy"))]
    expected = plain.outputs(PROMPTS[:4], params)
    speculation = {"model": pair.drafter, "policy": "constant", "num_speculative_tokens": 4}
    for proposer in (None, ScriptedProposer(plain.texts(expected), VOCAB)):
        with open_llm(
            pair.target,
            proposer=proposer,
            speculative_config=speculation,
            max_num_seqs=4,
            max_num_batched_tokens=24,
        ) as llm:
            assert_same(llm.generate(PROMPTS[:4], params), expected)
            assert_same(llm.generate(PROMPTS[:4], params), expected)  # from the prefix cache
            stats = llm.stats()
        assert stats.verified > stats.accepted > 0
    plain.llm.close()
