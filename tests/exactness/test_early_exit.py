"""Early exit in whole engines: the target's first layers draft on the target's own KV.

Outputs are those of plain decoding, and drafts those of a model that has these layers only and keeps KV of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import transformers

from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.model.loader import load_model
from dynaspec.observe.counts import SpecCounts
from dynaspec.propose.registry import Source, load_drafter
from support.checkpoints import VOCAB, Pair, save
from support.controllers import VaryingController
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.workloads import MODES, PROMPTS

EXIT = {"method": "early_exit", "assistant_early_exit": 1}


@pytest.fixture(scope="module")
def first_layer(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of the target's first layer, final norm and output layer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.target)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    folder = tmp_path_factory.mktemp("first_layer")
    save(model, folder)
    return str(folder)


def counts(tiny: Pair, plain: PlainDecoding, mode: str, drafter: dict[str, Any]) -> SpecCounts:
    """What was drafted of all prompts, twice, the second time with prefix hits."""
    params = [MODES[mode](i) for i in range(len(PROMPTS))]
    config = {"policy": "constant", "num_speculative_tokens": 4, **drafter}
    with open_llm(tiny.target, speculative_config=config, max_num_seqs=4, max_num_batched_tokens=24) as llm:
        for _ in range(2):
            assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        return llm.stats()


@pytest.mark.parametrize("mode", ["greedy", "truncated"])
def test_drafts_are_those_of_a_model_of_these_layers(
    mode: str, tiny: Pair, first_layer: str, plain: PlainDecoding
) -> None:
    """Greedy, in compiled drafts, and drawn, pass by pass."""
    own = counts(tiny, plain, mode, EXIT)
    model = counts(tiny, plain, mode, {"method": "draft_model", "model": first_layer})
    assert (own.draft_tokens, own.verified, own.accepted) == (model.draft_tokens, model.verified, model.accepted)
    assert own.verified > own.accepted > 0
    assert own.proposer_faults == 0


@pytest.mark.parametrize("crowded", [False, True], ids=["ample", "crowded"])
def test_everything_at_random(crowded: bool, tiny: Pair, plain: PlainDecoding) -> None:
    """Lengths, gates, probes, trims, stops, lookup in its place; ``crowded``: preemption and chunked prefill. Gates and
    probes leave KV where it does not belong, which the target's passes have to write over."""
    params = [MODES["mixed"](i) for i in range(len(PROMPTS))]
    with open_llm(
        tiny.target,
        controller=partial(VaryingController, seed=1),
        speculative_config={**EXIT, "policy": "auto", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        max_num_seqs=8,
        max_num_batched_tokens=16 if crowded else 1024,
        async_scheduling=crowded,
        kv_cache_memory=kv_bytes(9, tiny.target) if crowded else None,
    ) as llm:
        for _ in range(2):
            assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0
    assert stats.proposer_faults == 0
    assert (stats.preemptions > 0) == crowded


def test_auto(tiny: Pair, plain: PlainDecoding) -> None:
    params = [MODES["greedy"](i) for i in range(len(PROMPTS))]
    with open_llm(tiny.target, ticking=True, speculative_config=EXIT, max_num_seqs=4) as llm:
        for _ in range(3):
            assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        assert llm.stats().accepted > 0


def test_all_layers_are_no_exit(tiny: Pair) -> None:
    with (
        pytest.raises(ConfigError, match=r"assistant_early_exit is 2 but the target .* has 2 layers; expected fewer"),
        open_llm(tiny.target, speculative_config={"assistant_early_exit": 2}),
    ):
        pass


def test_a_target_that_runs_on_other_code() -> None:
    class Other:
        """Neither this engine's decoder nor anything like it."""

    target: Any = Other()
    source = Source(SpeculativeConfig(**EXIT), target, "the target", VOCAB, "auto", "cpu", load_model)
    with pytest.raises(ConfigError, match="the target does not run on this engine's own layers"):
        load_drafter(source)
