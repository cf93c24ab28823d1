"""Trees of heads that keep no KV: outputs are those of plain decoding, bit for bit, compiled and head by head."""

from __future__ import annotations

from typing import Any

import pytest

from dynaspec.propose.state_heads import StateHeadsProposer
from support.checkpoints import Pair
from support.engines import PlainDecoding, assert_same, open_llm
from support.state_heads import FittedHeads
from support.workloads import MODES, PROMPTS

TREES: dict[str, dict[str, Any]] = {
    "fixed": {"speculative_token_tree": [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]},
    "dynamic": {"policy": "constant", "num_speculative_tokens": 3, "tree_width": 3, "tree_nodes": 8},
}


@pytest.mark.parametrize("mode", ["greedy", "truncated", "mixed"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_output_is_that_of_plain_decoding(
    method: str, tree: str, mode: str, tiny: Pair, fitted_state_heads: dict[str, FittedHeads], plain: PlainDecoding
) -> None:
    prompts, params = PROMPTS[:4], [MODES[mode](i) for i in range(4)]
    config = {"method": method, "model": fitted_state_heads[method].path, **TREES[tree]}
    with open_llm(tiny.target, speculative_config=config, max_num_seqs=4) as llm:
        assert_same(llm.generate(prompts, params), plain.outputs(prompts, params))
        stats = llm.stats()
    assert stats.proposer_faults == 0
    assert stats.verified > stats.accepted > 0


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_compiled_trees_are_those_of_single_heads(
    method: str,
    tiny: Pair,
    fitted_state_heads: dict[str, FittedHeads],
    plain: PlainDecoding,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many tokens drafted and accepted, position by position."""
    prompts, params = PROMPTS[:4], [MODES["greedy"](i) for i in range(4)]
    config = {"method": method, "model": fitted_state_heads[method].path, **TREES["dynamic"]}
    counts = []
    for _ in range(2):
        with open_llm(tiny.target, speculative_config=config, max_num_seqs=4) as llm:
            assert_same(llm.generate(prompts, params), plain.outputs(prompts, params))
            stats = llm.stats()
        counts.append((stats.draft_tokens, stats.accepted_per_pos))
        monkeypatch.setattr(StateHeadsProposer, "__init__", _without_tree)
    assert counts[0] == counts[1]


_built = StateHeadsProposer.__init__


def _without_tree(proposer: StateHeadsProposer, *args: Any, **options: Any) -> None:
    _built(proposer, *args, **options)
    proposer._tree = None
