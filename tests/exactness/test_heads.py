"""Heads in whole engines: every layout, and whatever can come between two of their drafts.

Outputs are those of plain decoding, bit for bit; and drafts are those of a plain reference that has read the whole
text, which outputs do not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dynaspec import LLM, SamplingParams
from dynaspec.contract.outputs import RequestOutput
from dynaspec.propose import registry
from dynaspec.propose.autoregressive import AutoregressiveProposer
from support.checkpoints import VOCAB, Pair, save_pair
from support.controllers import VaryingController
from support.decoder_heads import LAYOUTS, MTP, FittedHead, Layout, put_into_target, save_fitted
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.head_engines import greedy, params_of, scripted, speculation
from support.seen_drafts import check_drafts, watch_drafts
from support.state_heads import LAYOUTS as STATE_LAYOUTS
from support.state_heads import FittedHeads
from support.state_heads import Layout as StateLayout
from support.state_heads import save_fitted as save_fitted_state_heads
from support.workloads import PROMPTS

STATE_METHODS = ("medusa", "mlp_speculator")


@pytest.fixture(scope="session")
def all_heads(
    fitted_heads: dict[str, FittedHead], fitted_state_heads: dict[str, FittedHeads]
) -> dict[str, FittedHead | FittedHeads]:
    """By method."""
    return {**fitted_heads, **fitted_state_heads}


@pytest.mark.parametrize("layout", [*LAYOUTS, *STATE_LAYOUTS], ids=lambda layout: layout.name)
def test_every_layout(layout: Layout | StateLayout, tiny: Pair, plain: PlainDecoding, tmp_path: Path) -> None:
    """Greedy, in compiled drafts, and drawn, pass by pass; with preemption, chunked prefill and prefix hits."""
    texts = [plain.llm.tokenizer.encode(prompt) for prompt in PROMPTS[:4]]
    head: FittedHead | FittedHeads
    if isinstance(layout, Layout):
        head, k = save_fitted(tmp_path, tiny.target, texts, layout, steps=60), 4
        told = {"method": layout.method}
    else:
        head, k = save_fitted_state_heads(tmp_path, tiny.target, texts, layout, steps=30), layout.heads
        told = {}  # their files say it
    with (
        watch_drafts(head.proposer) as seen,
        open_llm(
            tiny.target,
            speculative_config=speculation(head.path, num_speculative_tokens=k, **told),
            max_num_seqs=4,
            max_num_batched_tokens=24,
            async_scheduling=True,
            kv_cache_memory=kv_bytes(9, tiny.target, head.path, **told),
        ) as llm,
    ):
        for mode in ("greedy", "truncated"):
            params, before = params_of(mode)[:4], llm.stats()
            assert_same(llm.generate(PROMPTS[:4], params), plain.outputs(PROMPTS[:4], params))
            stats = llm.stats() - before
            assert stats.verified > stats.accepted > 0
        stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.proposer_faults == 0
    assert max(len(draft.tokens) for draft in seen) == k
    check_drafts(seen, head)


@pytest.mark.parametrize("drafting", ["target's own", "by path"])
def test_a_prediction_layer_in_its_targets_checkpoint(drafting: str, tmp_path: Path) -> None:
    """The target is a Qwen2 with more tensors; without a model the layer is looked for there."""
    mimo, target = MTP[0], save_pair(tmp_path, "qwen2").target
    with closing(PlainDecoding(target).llm) as without:
        texts = [without.tokenizer.encode(prompt) for prompt in PROMPTS[:4]]
        expected = [output.outputs[0].token_ids for output in without.generate(texts, greedy(30))]
    head = put_into_target(save_fitted(tmp_path / "head", target, texts, mimo, steps=60), target, tmp_path / "mimo")
    own = speculation(head.path, method="mtp") if drafting == "by path" else speculation("", method="mtp")
    config = {key: value for key, value in own.items() if value != ""}
    plain = PlainDecoding(head.path)
    with (
        closing(plain.llm),
        watch_drafts() as seen,
        open_llm(
            head.path,
            speculative_config=config,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            kv_cache_memory=kv_bytes(9, head.path, head.path, method="mtp"),
        ) as llm,
    ):
        outputs = llm.generate(texts, greedy(30))
        assert_same(outputs, plain.llm.generate(texts, greedy(30)))
        params = params_of("truncated")[:4]
        assert_same(llm.generate(PROMPTS[:4], params), plain.outputs(PROMPTS[:4], params))
        stats = llm.stats()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert stats.verified > stats.accepted > 0
    assert stats.preemptions > 0
    assert stats.proposer_faults == 0
    check_drafts(seen, head)


@pytest.mark.parametrize(
    ("method", "seed"),
    [("eagle", 0), ("mtp", 0), *((method, seed) for method in ("eagle3", *STATE_METHODS) for seed in range(3))],
)
@pytest.mark.parametrize("crowded", [False, True], ids=["ample", "crowded"])
def test_everything_at_random(
    crowded: bool,
    method: str,
    seed: int,
    tiny: Pair,
    all_heads: dict[str, FittedHead | FittedHeads],
    plain: PlainDecoding,
) -> None:
    """Lengths, beyond what some heads can draft; gates, probes, trims, stops, lookup in the head's place; ``crowded``:
    preemption and chunked prefill."""
    head, params, k = all_heads[method], params_of("mixed"), 6 if method in STATE_METHODS else 4
    config = speculation(head.path, policy="auto", num_speculative_tokens=k, prompt_lookup_min=1, prompt_lookup_max=3)
    with (
        watch_drafts(head.proposer) as seen,
        open_llm(
            tiny.target,
            controller=partial(VaryingController, seed=seed),
            speculative_config=config,
            max_num_seqs=8,
            max_num_batched_tokens=16 if crowded else 1024,
            async_scheduling=crowded,
            kv_cache_memory=kv_bytes(9, tiny.target, head.path) if crowded else None,
        ) as llm,
    ):
        for _ in range(2):
            assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0
    assert stats.proposer_faults == 0
    assert (stats.preemptions > 0) == crowded
    check_drafts(seen, head)


@pytest.mark.parametrize("catch_up", [512, 24], ids=["at once", "in chunks"])
def test_a_hundred_steps_without_drafts_and_back(
    catch_up: int, tiny: Pair, fitted_head: FittedHead, plain: PlainDecoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    catching_up = partial(AutoregressiveProposer, catch_up_tokens=catch_up)
    monkeypatch.setattr(registry, "AutoregressiveProposer", catching_up)
    params = [greedy(150), greedy(145), SamplingParams(temperature=0.8, seed=5, max_tokens=150, ignore_eos=True)]
    with (
        watch_drafts() as seen,
        open_llm(
            tiny.target,
            controller=scripted(*[3] * 8, *[0] * 100, *[3] * 40),
            speculative_config=speculation(fitted_head.path),
            max_num_seqs=3,
        ) as llm,
    ):
        assert_same(llm.generate(PROMPTS[:3], params), plain.outputs(PROMPTS[:3], params))
        stats = llm.stats()
    again = [i for i, draft in enumerate(seen) if len(draft.text) > 100]
    assert again
    assert again[0] > 3  # drafts before the pause
    if catch_up > 100:
        assert max(draft.unread for draft in seen) > 100
    else:
        assert max(draft.unread for draft in seen) <= catch_up
        assert stats.skipped["catching_up"] > 2 * 3
    assert stats.verified > stats.accepted > 0
    check_drafts(seen, fitted_head)


TRIMMED = {"eagle3": (6, 3, 0, 5), "medusa": (3, 2, 0, 3), "mlp_speculator": (3, 2, 0, 3)}
"""Lengths of drafts of which one token is verified."""


@pytest.mark.parametrize("mode", ["greedy", "truncated", "formed"])
@pytest.mark.parametrize("method", TRIMMED)
def test_trims_and_grammars(
    method: str, mode: str, tiny: Pair, all_heads: dict[str, FittedHead | FittedHeads], plain: PlainDecoding
) -> None:
    """What is drafted and not verified has been read by a head with KV, too; in others it has left no state behind."""
    params, head, lengths = params_of(mode), all_heads[method], TRIMMED[method]
    with (
        watch_drafts(head.proposer) as seen,
        open_llm(
            tiny.target,
            controller=scripted(*lengths, keep=1),
            speculative_config=speculation(head.path, num_speculative_tokens=max(lengths)),
            max_num_seqs=5,
            async_scheduling=mode == "truncated",
        ) as llm,
    ):
        assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.draft_tokens > max(1.5, max(lengths) / 3) * stats.verified
    assert stats.verified > stats.accepted > 0
    check_drafts(seen, head)


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_head_that_knows_none_of_the_tokens_allowed(
    method: str, tiny: Pair, all_heads: dict[str, FittedHead | FittedHeads], plain: PlainDecoding
) -> None:
    """It drafts any of them, and says so."""
    head = all_heads[method]
    allowed = tuple(sorted(set(range(VOCAB)) - set(head.ids.tolist())))[9:49:10]
    assert len(allowed) == 4
    common: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "allowed_token_ids": allowed}
    params = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=1.0, seed=3, **common),
        SamplingParams(temperature=0.3, seed=4, repetition_penalty=1.2, **common),
        SamplingParams(temperature=1.0, **common),
    ]
    with open_llm(tiny.target, speculative_config=speculation(head.path), max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS[:4], params)
        stats = llm.stats()
    assert_same(outputs[:3], plain.outputs(PROMPTS[:3], params[:3]))
    assert set(outputs[3].outputs[0].token_ids) <= set(allowed)
    assert stats.verified > stats.accepted > 0
    assert stats.proposer_faults == 0


BEGINNING = f"{PROMPTS[0]}, {PROMPTS[1]}"


def test_prefix_hits(tiny: Pair, fitted_head: FittedHead, plain: PlainDecoding) -> None:
    """On a beginning that the head has read, or only its target, or that lies where it has read something else."""
    with (
        watch_drafts() as seen,
        open_llm(
            tiny.target,
            speculative_config=speculation(fitted_head.path),
            kv_cache_memory=kv_bytes(14, tiny.target, fitted_head.path),
        ) as llm,
    ):

        def unread(end: str, drafting: bool = True) -> int:
            """How much of its prompt's cached part the head has to read for the first draft of a request."""
            before, params = len(seen), greedy(20, max_draft_tokens=None if drafting else 0)
            (output,) = llm.generate([BEGINNING + end], params)
            assert_same([output], plain.outputs([BEGINNING + end], [params]))
            assert output.num_cached_tokens >= 32 or end in ("0", "3")
            if not drafting:
                assert len(seen) == before
                return 0
            return output.num_cached_tokens - (len(seen[before].text) - seen[before].unread)

        unread("0", drafting=False)
        assert unread("1") > 30  # all of it, but the first token
        assert unread("2") == 0
        others = [greedy(30, max_draft_tokens=0)] * 4
        assert_same(llm.generate(PROMPTS[2:6], others), plain.outputs(PROMPTS[2:6], others))
        unread("3", drafting=False)
        assert unread("4") > 30
        assert unread("5") == 0
    check_drafts(seen, fitted_head)


@pytest.mark.parametrize("scheduling", ["serial", "async"])
def test_requests_that_are_cancelled(
    scheduling: str, tiny: Pair, fitted_head: FittedHead, plain: PlainDecoding
) -> None:
    """Others take their lanes and blocks over; running ones go, and one that waits."""
    params = [greedy(40 - i) for i in range(len(PROMPTS))]
    expected = plain.outputs(PROMPTS, params)
    leaving = {4: "0", 9: "2", 10: "7"}
    with (
        watch_drafts() as seen,
        open_llm(
            tiny.target,
            speculative_config=speculation(fitted_head.path),
            max_num_seqs=3,
            async_scheduling=scheduling == "async",
            kv_cache_memory=kv_bytes(9, tiny.target, fitted_head.path),
        ) as llm,
    ):
        outputs = run_and_cancel(llm, params, leaving)
        stats = llm.stats()
    for i, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if str(i) not in leaving.values():
            assert_same([found], [wanted])
            continue
        ids = found.outputs[0].token_ids
        assert found.outputs[0].finish_reason == "abort"
        assert ids == wanted.outputs[0].token_ids[: len(ids)]
        assert len(ids) < len(wanted.outputs[0].token_ids)
    assert len(outputs[0].outputs[0].token_ids) > 0
    assert len(outputs[7].outputs[0].token_ids) == 0
    assert stats.verified > stats.accepted > 0
    check_drafts(seen, fitted_head)


def run_and_cancel(llm: LLM, params: Sequence[SamplingParams], leaving: dict[int, str]) -> list[RequestOutput]:
    """Runs the prompts; cancels the requests ``leaving`` before these steps."""
    engine, last = llm._engine, {}
    for i, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add(str(i), prompt, one)
    step = 0
    while engine.unfinished:
        if step in leaving:
            output = engine.abort(leaving[step])
            assert output is not None
            last[output.request_id] = output
        last |= {output.request_id: output for output in engine.step()}
        step += 1
    return [last[str(i)] for i in range(len(params))]
