"""Whatever a proposer does, no request is lost and no output changes; the fault is counted and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dynaspec import SamplingParams
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.proposer import Drafts
from dynaspec.model.state_heads.medusa import MedusaHeads
from dynaspec.model.state_heads.mlp_speculator import MlpSpeculator
from dynaspec.propose import registry
from dynaspec.propose.drafter import DecoderHeadDrafter, Drafter, DraftModel
from support.checkpoints import VOCAB, Pair
from support.engines import PlainDecoding, assert_same, open_llm
from support.faulty import RaisingProposer, SlowProposer, Spoil, SpoiltModel, SpoiltProposer, spoilt_heads
from support.proposers import ScriptedProposer
from support.state_heads import FittedHeads
from support.workloads import MODES, PROMPTS

PROMPTS_USED = PROMPTS[:4]
PARAMS = [MODES[mode](i) for i, mode in enumerate(("greedy", "truncated", "logprobs", "greedy_penalised"))]
BOOKKEEPING = ("lag", "peek", "advance", "admit", "evict")


def spoil_row(**columns: Any) -> Spoil:
    """Writes values into the spoilt rows of the drafts' columns."""

    def spoil(drafts: Drafts, rows: np.ndarray) -> Drafts:
        for name, value in columns.items():
            getattr(drafts, name)[rows] = value
        return drafts

    return spoil


def spoil_all(**columns: Any) -> Spoil:
    """Replaces whole columns by functions of the good ones."""

    def spoil(drafts: Drafts, rows: np.ndarray) -> Drafts:
        return replace(drafts, **{name: make(drafts) for name, make in columns.items()})

    return spoil


def q_like(drafts: Drafts, value: float, width: int = VOCAB) -> torch.Tensor:
    return torch.full((*drafts.tokens.shape, width), value)


OF_ONE_REQUEST: dict[str, Spoil] = {
    "token_beyond_vocabulary": spoil_row(tokens=VOCAB),
    "token_negative": spoil_row(tokens=-1),
    "token_huge": spoil_row(tokens=2**40),
    "length_negative": spoil_row(lens=-1),
    "confidence_nan": spoil_row(confidence=np.nan),
    "confidence_infinite": spoil_row(confidence=np.inf),
}
OF_ALL: dict[str, Spoil] = {
    "none": lambda drafts, rows: None,
    "length_beyond_the_tokens": spoil_row(lens=60),
    "too_long": spoil_all(
        lens=lambda d: d.lens + 1, tokens=lambda d: np.zeros((len(d.lens), d.tokens.shape[1] + 1), np.int64)
    ),
    "tokens_of_fewer_requests": spoil_all(tokens=lambda d: d.tokens[:-1]),
    "tokens_flat": spoil_all(tokens=lambda d: d.tokens[0]),
    "tokens_fractional": spoil_all(tokens=lambda d: d.tokens + 0.5),
    "lengths_of_fewer_requests": spoil_all(lens=lambda d: d.lens[:-1]),
    "lengths_fractional": spoil_all(lens=lambda d: d.lens - 0.5),
    "confidence_of_another_shape": spoil_all(confidence=lambda d: d.confidence[:, :-1]),
    "early_exit_of_another_shape": spoil_all(early_exit=lambda d: d.early_exit[:-1]),
    "q_of_another_vocabulary": spoil_all(q=lambda d: q_like(d, 1 / VOCAB, VOCAB - 1)),
    "q_nan": spoil_all(q=lambda d: q_like(d, np.nan)),
    "rows_that_are_no_number": spoil_all(rows_per_pass=lambda d: ("many",)),
    "rows_that_are_negative": spoil_all(rows_per_pass=lambda d: (-1,)),
    "rows_that_are_none": spoil_all(rows_per_pass=lambda d: None),
    "q_of_fewer_requests": spoil_all(q=lambda d: q_like(d, 1 / VOCAB)[:-1]),
}


def speculation(tiny: Pair) -> dict[str, Any]:
    return {"model": tiny.drafter, "num_speculative_tokens": 4, "policy": "constant"}


@pytest.fixture(scope="module")
def expected(plain: PlainDecoding) -> list[RequestOutput]:
    return plain.outputs(PROMPTS_USED, PARAMS)


@pytest.fixture(scope="module")
def texts(plain: PlainDecoding, expected: list[RequestOutput]) -> list[tuple[int, ...]]:
    return plain.texts(expected)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["serial", "async"])
@pytest.mark.parametrize("method", BOOKKEEPING)
def test_a_fault_in_bookkeeping_switches_the_proposer_off(
    method: str,
    async_scheduling: bool,
    tiny: Pair,
    texts: Sequence[tuple[int, ...]],
    expected: list[RequestOutput],
    caplog: pytest.LogCaptureFixture,
) -> None:
    proposer = RaisingProposer(texts, method, first=6)
    with open_llm(
        tiny.target,
        proposer=proposer,
        speculative_config=speculation(tiny),
        async_scheduling=async_scheduling,
        max_num_seqs=4,
    ) as llm:
        assert_same(llm.generate(PROMPTS_USED, PARAMS), expected)
        assert_same(llm.generate(PROMPTS_USED, PARAMS), expected)
        stats = llm.stats()
        assert_same(llm.generate(PROMPTS_USED, PARAMS), expected)
        assert (llm.stats() - stats).draft_tokens == 0
    assert stats.proposer_faults == 1
    assert stats.draft_tokens > 0
    assert stats.skipped["proposer_fault"] > 0
    assert any("scripted" in message and "plain decoding" in message for message in errors(caplog))
    assert any("switched off" in message for message in errors(caplog))


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["serial", "async"])
def test_after_an_exception_later_requests_are_drafted_for(
    async_scheduling: bool,
    tiny: Pair,
    texts: Sequence[tuple[int, ...]],
    expected: list[RequestOutput],
    caplog: pytest.LogCaptureFixture,
) -> None:
    proposer = RaisingProposer(texts, "propose")
    with open_llm(
        tiny.target,
        proposer=proposer,
        speculative_config=speculation(tiny),
        async_scheduling=async_scheduling,
        max_num_seqs=4,
    ) as llm:
        assert_same(llm.generate(PROMPTS_USED, PARAMS), expected)
        first = llm.stats()
        assert_same(llm.generate(PROMPTS_USED, PARAMS), expected)
        second = llm.stats() - first
    assert first.proposer_faults == 1
    assert second.proposer_faults == 0
    assert second.draft_tokens > first.draft_tokens > 0
    assert any("plain decoding" in message for message in errors(caplog))
    assert not any("switched off" in message for message in errors(caplog))


def test_after_three_exceptions_the_proposer_is_not_asked_any_more(
    tiny: Pair,
    texts: Sequence[tuple[int, ...]],
    expected: list[RequestOutput],
    caplog: pytest.LogCaptureFixture,
) -> None:
    proposer = RaisingProposer(texts, "propose", first=1, times=1000)
    with open_llm(tiny.target, proposer=proposer, speculative_config=speculation(tiny), max_num_seqs=1) as llm:
        for _ in range(2):
            assert_same(llm.generate(PROMPTS_USED, PARAMS), expected)
        stats = llm.stats()
    assert proposer.calls == stats.proposer_faults == 3
    assert stats.faults == {"raised": 3}
    assert stats.draft_tokens == 0
    assert sum("switched off" in message for message in errors(caplog)) == 1


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["serial", "async"])
def test_a_proposer_that_takes_far_too_long_is_not_asked_any_more(
    async_scheduling: bool,
    tiny: Pair,
    texts: Sequence[tuple[int, ...]],
    expected: list[RequestOutput],
    caplog: pytest.LogCaptureFixture,
) -> None:
    proposer = SlowProposer(texts, 0.16, first=12)
    with open_llm(
        tiny.target,
        proposer=proposer,
        speculative_config=speculation(tiny),
        async_scheduling=async_scheduling,
        max_num_seqs=4,
    ) as llm:
        outputs = llm.generate(PROMPTS_USED, PARAMS)
        again = llm.generate(PROMPTS_USED, PARAMS)
        stats = llm.stats()
    assert_same([*outputs, *again], [*expected, *expected])
    assert proposer.calls == 12 + 7
    assert stats.faults == {"overrun": 1}
    assert stats.accepted > 0
    assert stats.skipped["proposer_fault"] > 0
    assert sum("keeps taking too long" in message for message in errors(caplog)) == 1
    assert sum("switched off" in message for message in errors(caplog)) == 1


@pytest.mark.parametrize("kind", OF_ONE_REQUEST)
def test_nonsense_for_one_request_leaves_the_others_alone(
    kind: str,
    tiny: Pair,
    texts: Sequence[tuple[int, ...]],
    expected: list[RequestOutput],
    caplog: pytest.LogCaptureFixture,
) -> None:
    proposer = SpoiltProposer(texts, OF_ONE_REQUEST[kind])
    with open_llm(tiny.target, proposer=proposer, speculative_config=speculation(tiny), max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS_USED, PARAMS)
        stats = llm.stats()
    assert_same(outputs, expected)
    assert stats.faults == {"nonsense": 1}
    drafted = [output.outputs[0].metrics.drafted for output in outputs]
    assert drafted[0] <= 3 * 4  # until the fault
    assert min(drafted[1:]) > 3 * 4
    assert stats.skipped["proposer_fault"] > 0
    assert any(f"nonsense for {outputs[0].request_id}" in message for message in errors(caplog))


@pytest.mark.parametrize("kind", OF_ALL)
def test_an_answer_of_the_wrong_form_harms_nobody(
    kind: str,
    tiny: Pair,
    texts: Sequence[tuple[int, ...]],
    expected: list[RequestOutput],
    caplog: pytest.LogCaptureFixture,
) -> None:
    proposer = SpoiltProposer(texts, OF_ALL[kind])
    unseeded = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    with open_llm(tiny.target, proposer=proposer, speculative_config=speculation(tiny), max_num_seqs=5) as llm:
        outputs = llm.generate([*PROMPTS_USED, PROMPTS[5]], [*PARAMS, unseeded])
        stats = llm.stats()
        assert_same(outputs[:4], expected)
        assert len(outputs[4].outputs[0].token_ids) == 30
        assert_same(llm.generate(PROMPTS_USED, PARAMS), expected)
        assert (llm.stats() - stats).draft_tokens > 0
    assert stats.proposer_faults == 1
    assert any("scripted" in message for message in errors(caplog))


@pytest.mark.parametrize("who", ["draft model", "head", "medusa", "mlp_speculator"])
@pytest.mark.parametrize("sample_method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("rows", [slice(None), slice(1)], ids=["all_rows", "one_row"])
def test_a_drafter_whose_logits_go_bad(
    rows: slice,
    sample_method: str,
    who: str,
    tiny: Pair,
    head: str,
    fitted_state_heads: dict[str, FittedHeads],
    expected: list[RequestOutput],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def spoilt(honest: Callable[..., Drafter]) -> Callable[..., Drafter]:
        return lambda weights, *rest, **options: honest(SpoiltModel(weights, first=10, rows=rows), *rest, **options)

    monkeypatch.setattr(registry, "DraftModel", spoilt(DraftModel))
    monkeypatch.setattr(registry, "DecoderHeadDrafter", spoilt(DecoderHeadDrafter))
    for kind in (MedusaHeads, MlpSpeculator):
        monkeypatch.setattr(kind, "run", spoilt_heads(kind.run, first=10, rows=rows))  # type: ignore[attr-defined]
    config = speculation(tiny) | {"draft_sample_method": sample_method}
    if who in fitted_state_heads:
        config |= {"model": fitted_state_heads[who].path, "num_speculative_tokens": 3}
    elif who == "head":
        config["model"] = head
    unseeded = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    with open_llm(tiny.target, speculative_config=config, max_num_seqs=5) as llm:
        outputs = llm.generate([*PROMPTS_USED, PROMPTS[5]], [*PARAMS, unseeded])
        stats = llm.stats()
    assert_same(outputs[:4], expected)
    assert len(outputs[4].outputs[0].token_ids) == 30
    assert stats.proposer_faults > 0
    assert stats.draft_tokens > 0
    assert errors(caplog)


def test_a_proposer_without_faults_is_left_alone(
    tiny: Pair,
    texts: Sequence[tuple[int, ...]],
    expected: list[RequestOutput],
    caplog: pytest.LogCaptureFixture,
) -> None:
    proposer = ScriptedProposer(texts, VOCAB)
    with open_llm(tiny.target, proposer=proposer, speculative_config=speculation(tiny), max_num_seqs=4) as llm:
        assert_same(llm.generate(PROMPTS_USED, PARAMS), expected)
        stats = llm.stats()
    assert stats.proposer_faults == 0
    assert "proposer_fault" not in stats.skipped
    assert not errors(caplog)
