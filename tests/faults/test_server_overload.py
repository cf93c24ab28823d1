"""More than a server can take, less memory than it needs, a drafter that is no good: who is in is served anyway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dynaspec import AsyncLLM, SamplingParams
from dynaspec.contract.proposer import DecodeBatch, Drafts, Proposer
from dynaspec.contract.step import SpecPlan
from dynaspec.server.app import create_app
from dynaspec.server.config import ServerConfig
from dynaspec.server.run import make_state
from support.checkpoints import VOCAB, Pair
from support.engines import PlainDecoding, kv_bytes, open_async_llm
from support.faulty import RaisingProposer, SlowProposer
from support.proposers import ScriptedProposer
from support.workloads import PROMPTS
from unit.server.serving import Client, error_of, make_app
from unit.server.wire import gated

PATH = "/v1/completions"
TOKENS = 48
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
RUNNING, QUEUED = 2, 6
PROMPTS_USED = PROMPTS[:4]


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


async def test_who_is_not_refused_waits_no_longer_than_the_queue_is(tiny: Pair) -> None:
    llm = AsyncLLM(tiny.target, max_num_seqs=RUNNING, stream_interval_s=0)
    state = make_state(llm, ServerConfig.build({}, max_queued_requests=QUEUED))
    client, done = Client(create_app(state)), []

    async def ask(number: int) -> None:
        response = await client.post(PATH, prompt=[number + 1], **GREEDY)
        if response.status_code == 200:
            done.append(number)
        else:
            assert response.status_code == 503
            assert error_of(response)["code"] == "overloaded"
            assert 1 <= int(response.headers["retry-after"]) <= 60

    with gated(llm) as gate, mock.patch.object(llm._thread, "submit", wraps=llm._thread.submit) as submit:
        asked = []
        for number in range(40):  # one after the other, so that there is an order to be kept
            asked.append(asyncio.create_task(ask(number)))
            while submit.call_count <= number and not asked[-1].done():
                await asyncio.sleep(0)
        assert (done, state.admission.rejected) == ([], 40 - RUNNING - QUEUED)
        gate.open = True
        await asyncio.gather(*asked)
    assert [number // RUNNING for number in done] == sorted(number // RUNNING for number in done)
    assert sorted(done) == list(range(RUNNING + QUEUED))  # whoever came first
    assert (await llm.snapshot()).counts.steps <= (RUNNING + QUEUED) // RUNNING * (TOKENS + 1)
    await client.ask(PATH, prompt="x", max_tokens=1)
    await client.close()
    llm.close()


async def test_too_little_memory_makes_requests_wait_but_changes_no_answer(tiny: Pair, plain: PlainDecoding) -> None:
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=TOKENS)] * len(PROMPTS)
    known = [output.outputs[0].text for output in plain.outputs(PROMPTS, params)]
    llm = AsyncLLM(
        tiny.target,
        speculative_config={"model": tiny.drafter, "policy": "constant", "num_speculative_tokens": 3},
        max_num_seqs=8,
        kv_cache_memory=kv_bytes(9, tiny.target, tiny.drafter),
    )
    client = Client(make_app(llm))
    answers = await asyncio.gather(*[client.ask(PATH, prompt=prompt, **GREEDY) for prompt in PROMPTS])
    assert [text_of(answer) for answer in answers] == known
    seen = await llm.snapshot()
    assert seen.counts.preemptions > 0
    assert (seen.running, seen.waiting, seen.kv_blocks_used) == (0, 0, 0)
    await llm.verify_integrity()
    await client.close()
    llm.close()


def raising(texts: Sequence[Sequence[int]]) -> Proposer:
    return RaisingProposer(texts, "propose", times=1000)


def slow(texts: Sequence[Sequence[int]]) -> Proposer:
    return SlowProposer(texts, 0.16, first=12)


class Babbling(ScriptedProposer):
    """Drafts tokens that are none."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(texts, VOCAB, fixed_length=True)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        drafts = super().propose(batch, plan)
        return replace(drafts, tokens=np.full_like(drafts.tokens, -1))


@pytest.fixture(scope="module")
def known(plain: PlainDecoding) -> tuple[list[str], list[tuple[int, ...]]]:
    """Texts and tokens of plain decoding."""
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=TOKENS)] * len(PROMPTS_USED)
    outputs = plain.outputs(PROMPTS_USED, params)
    return [output.outputs[0].text for output in outputs], plain.texts(outputs)


@pytest.mark.parametrize(("make", "kind"), [(raising, "raised"), (slow, "overrun"), (Babbling, "nonsense")])
async def test_a_drafter_that_is_no_good_is_switched_off_and_that_is_told(
    make: Callable[[Sequence[Sequence[int]]], Proposer],
    kind: str,
    tiny: Pair,
    known: tuple[list[str], list[tuple[int, ...]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts, tokens = known
    options = {"policy": "constant", "num_speculative_tokens": 4, "model": tiny.drafter}
    with open_async_llm(tiny.target, proposer=make(tokens), speculative_config=options, max_num_seqs=4) as llm:
        client = Client(make_app(llm))
        for _ in range(4):
            answers = await asyncio.gather(*[client.ask(PATH, prompt=prompt, **GREEDY) for prompt in PROMPTS_USED])
            assert [text_of(answer) for answer in answers] == texts
        page = (await client.get("/metrics")).text
        assert (await client.get("/health")).status_code == 200
        await client.close()
    told = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line[0] != "#"}
    [enabled] = [value for name, value in told.items() if name.startswith("dynaspec:proposer_enabled{")]
    faults = {name: value for name, value in told.items() if "proposer_faults" in name and f'"{kind}"' in name}
    assert enabled == 0
    assert sum(faults.values()) >= 1
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert sum("switched off" in message for message in errors) == 1
