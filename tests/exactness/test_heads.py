"""Heads in whole engines: every layout, and whatever can come between two of their drafts.

Outputs are those of plain decoding, bit for bit; and drafts are those of a plain reference that has read the whole
text, which outputs do not show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dynaspec import LLM, SamplingParams
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.step import Limits
from dynaspec.propose import registry
from dynaspec.propose.autoregressive import AutoregressiveProposer
from support.checkpoints import Pair, save_pair
from support.controllers import VaryingController
from support.decoder_heads import LAYOUTS, MTP, FittedHead, Layout, put_into_target, save_fitted
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.seen_drafts import check_drafts, watch_drafts
from support.workloads import MODES, PROMPTS
from unit.engine.fakes import ScriptedController


def speculation(head: str, **options: Any) -> dict[str, Any]:
    """The head by itself; its config.json says of which method it is, if no option does."""
    return {"model": head, "policy": "constant", "num_speculative_tokens": 4, "prompt_lookup_max": 0, **options}


def scripted(*lengths: int, keep: int | None = None) -> Callable[[Limits], ScriptedController]:
    """A controller that drafts these lengths, one a step, over and over."""
    return lambda limits: ScriptedController(lengths, keep=keep)


def params_of(mode: str) -> list[SamplingParams]:
    return [MODES[mode](i) for i in range(len(PROMPTS))]


def greedy(most: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, **options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout(layout: Layout, tiny: Pair, plain: PlainDecoding, tmp_path: Path) -> None:
    """Greedy, in compiled drafts, and drawn, pass by pass; with preemption, chunked prefill and prefix hits."""
    texts = [plain.llm.tokenizer.encode(prompt) for prompt in PROMPTS[:4]]
    head = save_fitted(tmp_path, tiny.target, texts, layout, steps=60)
    with (
        watch_drafts() as seen,
        open_llm(
            tiny.target,
            speculative_config=speculation(head.path, method=layout.kind),
            max_num_seqs=4,
            max_num_batched_tokens=24,
            async_scheduling=True,
            kv_cache_memory=kv_bytes(9, tiny.target, head.path, method=layout.kind),
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


@pytest.mark.parametrize(("method", "seed"), [("eagle3", 0), ("eagle3", 1), ("eagle3", 2), ("eagle", 0), ("mtp", 0)])
@pytest.mark.parametrize("crowded", [False, True], ids=["ample", "crowded"])
def test_everything_at_random(
    crowded: bool, method: str, seed: int, tiny: Pair, fitted_heads: dict[str, FittedHead], plain: PlainDecoding
) -> None:
    """Lengths, gates, probes, trims, stops, lookup in the head's place; ``crowded``: preemption and chunked prefill."""
    head, params = fitted_heads[method], params_of("mixed")
    config = speculation(head.path, policy="auto", prompt_lookup_min=1, prompt_lookup_max=3)
    with (
        watch_drafts() as seen,
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


@pytest.mark.parametrize("mode", ["greedy", "truncated"])
def test_trims(mode: str, tiny: Pair, fitted_head: FittedHead, plain: PlainDecoding) -> None:
    """What is drafted and not verified has been read by the head, too."""
    params = params_of(mode)
    with (
        watch_drafts() as seen,
        open_llm(
            tiny.target,
            controller=scripted(6, 3, 0, 5, keep=1),
            speculative_config=speculation(fitted_head.path, num_speculative_tokens=6),
            max_num_seqs=5,
            async_scheduling=mode == "truncated",
        ) as llm,
    ):
        assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.draft_tokens > 2 * stats.verified
    assert stats.verified > stats.accepted > 0
    check_drafts(seen, fitted_head)


def test_a_head_that_knows_none_of_the_tokens_allowed(
    tiny: Pair, fitted_head: FittedHead, plain: PlainDecoding
) -> None:
    """It drafts any of them, and says so."""
    allowed = (45, 60, 105, 200)
    assert not set(allowed) & set(fitted_head.ids.tolist())
    common: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "allowed_token_ids": allowed}
    params = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=1.0, seed=3, **common),
        SamplingParams(temperature=0.3, seed=4, repetition_penalty=1.2, **common),
        SamplingParams(temperature=1.0, **common),
    ]
    with open_llm(tiny.target, speculative_config=speculation(fitted_head.path), max_num_seqs=4) as llm:
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
