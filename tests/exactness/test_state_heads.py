"""What is particular to Medusa heads and MLP speculators in whole engines; what holds for all heads: ``test_heads``."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dynaspec import SamplingParams
from dynaspec.contract.errors import ConfigError
from support.checkpoints import Pair
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.head_engines import greedy, params_of, scripted, speculation
from support.seen_drafts import check_drafts, watch_drafts
from support.state_heads import (
    LAYOUTS,
    FittedHeads,
    published,
    random_tensors,
)
from support.workloads import PROMPTS


@pytest.fixture(params=["medusa", "mlp_speculator"])
def heads(request: pytest.FixtureRequest, fitted_state_heads: dict[str, FittedHeads]) -> FittedHeads:
    return fitted_state_heads[request.param]


def test_a_hundred_steps_without_drafts_and_back(tiny: Pair, heads: FittedHeads, plain: PlainDecoding) -> None:
    """The first draft afterwards is as any other: nothing has been missed."""
    params = [greedy(150), greedy(145), SamplingParams(temperature=0.8, seed=5, max_tokens=150, ignore_eos=True)]
    with (
        watch_drafts(heads.proposer) as seen,
        open_llm(
            tiny.target,
            controller=scripted(*[3] * 8, *[0] * 100, *[3] * 40),
            speculative_config=speculation(heads.path),
            max_num_seqs=3,
        ) as llm,
    ):
        assert_same(llm.generate(PROMPTS[:3], params), plain.outputs(PROMPTS[:3], params))
        stats = llm.stats()
    lengths = [len(draft.text) for draft in seen]
    assert max(later - earlier for earlier, later in pairwise(lengths)) > 80
    assert set(stats.skipped) <= {"policy", "no_room"}
    check_drafts(seen, heads)


BEGINNING = f"{PROMPTS[0]}, {PROMPTS[1]}"


def test_prefix_hits(tiny: Pair, heads: FittedHeads, plain: PlainDecoding) -> None:
    """On beginnings whose states were kept as their KV was; also a whole prompt but its last token, whose blocks hold
    the state that the first draft reads."""
    with (
        watch_drafts(heads.proposer) as seen,
        open_llm(
            tiny.target,
            speculative_config=speculation(heads.path),
            kv_cache_memory=kv_bytes(14, tiny.target, heads.path),
        ) as llm,
    ):
        block = llm.tokenizer.encode(BEGINNING)[:33]
        for n, prompt in enumerate((BEGINNING + "0", BEGINNING + "1", *PROMPTS[2:6], BEGINNING + "2", block, block)):
            params, before = greedy(20), len(seen)
            (output,) = llm.generate([prompt], params)
            (expected,) = plain.llm.generate([prompt], params)
            assert_same([output], [expected])
            assert output.num_cached_tokens >= (32 if n in (1, 8) else 0)
            assert len(seen) > before
    check_drafts(seen, heads)


def test_a_model_that_holds_its_heads_itself(
    tiny: Pair, fitted_state_heads: dict[str, FittedHeads], plain: PlainDecoding, tmp_path: Path
) -> None:
    """It is target and drafter at once: its folder is named twice."""
    theirs, params = Path(tiny.target), params_of("truncated")[:3]
    for file in theirs.iterdir():
        shutil.copy(file, tmp_path)
    fitted = fitted_state_heads["medusa"]
    layout = next(layout for layout in LAYOUTS if layout.beside)
    layout = replace(layout, hidden=fitted.layout.hidden, vocab=fitted.layout.vocab, heads=2)
    save_file(
        load_file(theirs / "model.safetensors") | published(layout, random_tensors(layout)),
        tmp_path / "model.safetensors",
    )
    config = json.loads((theirs / "config.json").read_text()) | {"medusa_num_heads": 2, "medusa_num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_llm(str(tmp_path), speculative_config=speculation(str(tmp_path)), max_num_seqs=3) as llm:
        assert llm.config.speculative_config.method == "medusa"
        assert_same(llm.generate(PROMPTS[:3], params), plain.outputs(PROMPTS[:3], params))
        stats = llm.stats()
    assert stats.verified > 100
    assert stats.proposer_faults == 0


def test_plain_operations_in_another_dtype(tiny: Pair, heads: FittedHeads) -> None:
    """Nothing is compiled there, as on other devices. Heads and states have the target's dtype."""
    with open_llm(tiny.target, dtype="float16", speculative_config=speculation(heads.path), max_num_seqs=4) as llm:
        for mode in ("greedy", "truncated"):
            before = llm.stats()
            llm.generate(PROMPTS[:4], params_of(mode)[:4])
            stats = llm.stats() - before
            assert stats.verified > stats.accepted > 0.05 * stats.verified
            assert stats.proposer_faults == 0


def test_lengths(tiny: Pair, heads: FittedHeads) -> None:
    """What is not said is as many as there are heads; more is an error where it is a length, and none where it is an
    upper bound, which lookups beside them may reach."""
    for policy in ("constant", "heuristic", "elastic"):
        with open_llm(tiny.target, speculative_config=speculation(heads.path, policy=policy)) as llm:
            assert llm._engine.stats is not None
            assert longest(llm) == heads.layout.heads == llm.config.speculative_config.num_speculative_tokens
    for policy in ("auto", "confidence"):
        with open_llm(tiny.target, speculative_config=speculation(heads.path, policy=policy)) as llm:
            assert longest(llm) == heads.layout.heads
    with open_llm(tiny.target, speculative_config={"model": heads.path, "num_speculative_tokens": 7}) as llm:
        assert longest(llm) == 7
    for options in (
        {"num_speculative_tokens": 5},
        {"num_speculative_tokens": 5, "policy": "heuristic"},
        {"policy": "elastic", "draft_length_options": [2, 5]},
        {"policy": "schedule", "num_speculative_tokens_per_batch_size": [[1, 4, 5]]},
    ):
        sentence = rf"num_speculative_tokens is 5 and policy is '.*', but .* has {heads.layout.heads} heads"
        with (
            pytest.raises(ConfigError, match=sentence),
            open_llm(tiny.target, speculative_config=speculation(heads.path) | options),
        ):
            raise AssertionError("not reached")


def longest(llm: Any) -> int:
    return int(llm._engine._loop._step._limits.draft_lens[-1])


def test_what_heads_without_kv_have_no_use_for(tiny: Pair, heads: FittedHeads) -> None:
    for options, sentence in (
        ({"kv_write_gating_threshold": 0.3}, "cannot leave out KV writes"),
        ({"dtype": "bfloat16"}, f"dtype is 'bfloat16' but method is '{heads.layout.method}', whose head has"),
        ({"posterior_threshold": 0.1}, "posterior_threshold is 0.1; expected no posterior_threshold"),
    ):
        with (
            pytest.raises(ConfigError, match=sentence),
            open_llm(tiny.target, speculative_config=speculation(heads.path) | options),
        ):
            raise AssertionError("not reached")
