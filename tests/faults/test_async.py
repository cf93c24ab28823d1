"""``AsyncLLM`` under cancellations, bad requests and the death of its engine: every caller gets an answer, once."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from dynaspec import AsyncLLM, SamplingParams
from dynaspec.contract.errors import DynaspecError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind
from support.checkpoints import Pair
from support.engines import PlainDecoding, assert_same, kv_bytes, open_async_llm
from support.faulty import Injected
from support.workloads import MODES, PROMPTS

PATIENCE_S = 60.0
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)


@pytest.fixture(params=["serial", "async"])
def options(request: pytest.FixtureRequest, tiny: Pair) -> dict[str, Any]:
    """An engine so short of memory that requests are preempted as well."""
    return {
        "speculative_config": {"model": tiny.drafter, "num_speculative_tokens": 4},
        "async_scheduling": request.param == "async",
        "max_num_seqs": 6,
        "kv_cache_memory": kv_bytes(14, tiny.target, tiny.drafter),
    }


@pytest.fixture
def llm(tiny: Pair, options: dict[str, Any]) -> Iterator[AsyncLLM]:
    with open_async_llm(tiny.target, **options) as llm:
        yield llm


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str) -> list[RequestOutput]:
    async with asyncio.timeout(PATIENCE_S):
        return [output async for output in llm.generate(prompt, params, request_id=request_id)]


async def rest(stream: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    async with asyncio.timeout(PATIENCE_S):
        return [output async for output in stream]


async def settled(llm: AsyncLLM) -> None:
    """Waits until nothing runs; then every KV block is free and the books agree."""
    engine = llm._engine
    async with asyncio.timeout(PATIENCE_S):
        while engine.unfinished or llm._streams:
            await asyncio.sleep(0.01)
    tables = engine._scheduler.tables
    assert tables.pool.free_count == tables.pool.num_blocks
    engine.verify_integrity()


async def test_requests_that_come_together_get_their_own_answers(llm: AsyncLLM, plain: PlainDecoding) -> None:
    params = [MODES["mixed"](i) for i in range(len(PROMPTS))]
    streams = await asyncio.gather(
        *(collect(llm, prompt, one, str(i)) for i, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)))
    )
    assert_same([outputs[-1] for outputs in streams], plain.outputs(PROMPTS, params))
    for outputs in streams:
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    await settled(llm)


async def test_deltas_add_up(llm: AsyncLLM, plain: PlainDecoding) -> None:
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        params = SamplingParams(
            temperature=0.8, seed=3, n=2, max_tokens=40, stop=["e", "an"], logprobs=1, output_kind=kind
        )
        (expected,) = plain.outputs([PROMPTS[2]], [params])
        outputs = await collect(llm, PROMPTS[2], params, kind.value)
        for i, completion in enumerate(expected.outputs):
            parts = [output.outputs[i] for output in outputs]
            assert "".join(part.text for part in parts) == completion.text
            assert sum((part.token_ids for part in parts), ()) == completion.token_ids
            assert sum((part.logprobs or () for part in parts), ()) == completion.logprobs
        assert kind is RequestOutputKind.DELTA or len(outputs) == 1


@dataclass(frozen=True)
class Customer:
    """What one caller asks for, and how it behaves after its output number ``patience``."""

    prompt: str
    params: SamplingParams
    fate: str
    patience: int
    delay_s: float

    async def visit(self, llm: AsyncLLM, request_id: str) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        await asyncio.sleep(self.delay_s)
        stream = llm.generate(self.prompt, self.params, request_id=request_id)
        async for output in stream:
            outputs.append(output)
            if len(outputs) == self.patience and not output.finished:
                if self.fate == "abort":
                    await llm.abort(request_id)
                elif self.fate == "cancel":
                    raise asyncio.CancelledError
                elif self.fate == "leave":
                    break
        await stream.aclose()
        return outputs


def customers(count: int) -> list[Customer]:
    dice = random.Random(0)
    modes = [MODES[name] for name in ("greedy", "edited", "several", "logprobs")]
    fates = ("finish", "finish", "abort", "leave", "cancel")
    return [
        Customer(PROMPTS[i], dice.choice(modes)(i), dice.choice(fates), dice.randrange(1, 6), dice.random() * 0.3)
        for i in dice.choices(range(len(PROMPTS)), k=count)
    ]


async def test_a_storm_of_requests_and_cancellations(llm: AsyncLLM, plain: PlainDecoding) -> None:
    """Each is finished by itself, aborted, or left early; each gets one last answer, and nothing leaks."""
    visitors = customers(48)
    expected = plain.outputs([v.prompt for v in visitors], [v.params for v in visitors])
    async with asyncio.timeout(PATIENCE_S):
        visits = [v.visit(llm, f"r{number}") for number, v in enumerate(visitors)]
        streams = await asyncio.gather(*visits, return_exceptions=True)
    await settled(llm)
    fates = set()
    for visitor, outputs, wanted in zip(visitors, streams, expected, strict=True):
        if isinstance(outputs, BaseException):
            assert isinstance(outputs, asyncio.CancelledError)
            assert visitor.fate == "cancel"
            fates.add("cancelled")
            continue
        last = outputs[-1]
        assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
        assert last.finished or visitor.fate == "leave"
        aborted = any(completion.finish_reason == "abort" for completion in last.outputs)
        fates.add("aborted" if aborted else "finished" if last.finished else "left")
        if aborted:
            assert visitor.fate == "abort"
        elif last.finished:
            assert_same([last], [wanted])
    assert fates == {"cancelled", "aborted", "finished", "left"}
    stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.proposer_faults == 0
    again = await collect(llm, visitors[0].prompt, visitors[0].params, "again")
    assert_same(again[-1:], expected[:1])


async def test_an_abort_before_the_first_token(llm: AsyncLLM) -> None:
    stream = llm.generate(PROMPTS[0], LONG, request_id="a")
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)  # the request is handed in
    await llm.abort("a")
    async with asyncio.timeout(PATIENCE_S):
        output = await first
        while not output.finished:
            output = await anext(stream)
    assert output.outputs[0].finish_reason == "abort"
    assert await rest(stream) == []
    await llm.abort("a")  # no longer known: nothing happens
    await settled(llm)


async def test_bad_requests_do_not_disturb_the_others(llm: AsyncLLM, plain: PlainDecoding) -> None:
    good = asyncio.create_task(collect(llm, PROMPTS[0], LONG, "good"))
    bad_prompts = ["", "\ud800", {"prompt_token_ids": [10**6]}, {"prompt_token_ids": [5] * 1000}, {"a": 1}]
    for i, bad in enumerate(bad_prompts):
        with pytest.raises(RequestError):
            await collect(llm, bad, LONG, f"bad{i}")
    with pytest.raises(RequestError, match="already"):
        await collect(llm, PROMPTS[1], LONG, "good")
    with pytest.raises(RequestError, match="logit_bias"):
        await collect(llm, PROMPTS[1], SamplingParams(logit_bias={9999: 1.0}), "bias")
    assert llm.healthy
    assert_same((await good)[-1:], plain.outputs(PROMPTS[:1], [LONG]))
    await settled(llm)


async def test_a_request_larger_than_the_memory_is_refused_while_others_run(
    tiny: Pair, options: dict[str, Any], plain: PlainDecoding
) -> None:
    memory = kv_bytes(4, tiny.target, tiny.drafter)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    with open_async_llm(tiny.target, **options | {"kv_cache_memory": memory}) as llm:
        good = asyncio.create_task(collect(llm, PROMPTS[3], params, "good"))
        with pytest.raises(RequestError, match="KV cache holds 64; expected"):
            await collect(llm, PROMPTS[0], LONG, "large")
        assert_same((await good)[-1:], plain.outputs([PROMPTS[3]], [params]))
        await settled(llm)


async def test_a_dying_engine_ends_every_stream_at_once(
    tiny: Pair, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_async_llm(tiny.target, **options) as llm:
        verifier = vars(llm._engine._loop)["_step"]._verifier
        verify, calls = verifier.verify, iter(range(10**6))

        def dies(*args: Any) -> Any:
            if next(calls) == 8:
                raise Injected("the target pass failed")
            return verify(*args)

        monkeypatch.setattr(verifier, "verify", dies, raising=False)
        streams = [asyncio.create_task(collect(llm, prompt, LONG, str(i))) for i, prompt in enumerate(PROMPTS)]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait(streams)
        for stream in streams:
            error = stream.exception()
            assert isinstance(error, DynaspecError)
            assert "the target pass failed" in str(error)
        assert not llm.healthy
        with pytest.raises(DynaspecError, match="stopped"):
            await collect(llm, PROMPTS[0], LONG, "late")
        with pytest.raises(DynaspecError, match="stopped"):
            await llm.abort("0")
    assert any("the engine has stopped" in record.getMessage() for record in caplog.records)
    assert not any(thread.name.startswith("dynaspec") for thread in threading.enumerate())


async def test_closing_ends_what_is_running(tiny: Pair, options: dict[str, Any]) -> None:
    with open_async_llm(tiny.target, **options) as llm:
        stream = llm.generate(PROMPTS[0], LONG, request_id="a")
        await anext(stream)
        await asyncio.to_thread(llm.close)
        with pytest.raises(DynaspecError, match="closed"):
            await rest(stream)
        with pytest.raises(DynaspecError, match="stopped"):
            await collect(llm, PROMPTS[0], LONG, "late")
