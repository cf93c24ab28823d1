"""``AsyncLLM`` under cancellations, bad requests and the death of its engine: every caller gets an answer, once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from dynaspec import AsyncLLM, SamplingParams
from dynaspec.api.engine_thread import join
from dynaspec.contract.errors import DynaspecError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind
from dynaspec.engine.loop import OverlappedLoop
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
    async with asyncio.timeout(PATIENCE_S):
        while (seen := await llm.snapshot()).running or seen.waiting:
            await asyncio.sleep(0.01)
    assert seen.kv_blocks_used == 0
    await llm.verify_integrity()
    assert not llm._thread._streams
    assert not llm._engine.unfinished


def verifier_of(llm: AsyncLLM) -> Any:
    return vars(llm._engine._loop)["_step"]._verifier


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
            assert [token for part in parts for token in part.token_ids] == completion.token_ids
            assert sum((part.logprobs or () for part in parts), ()) == completion.logprobs
        assert kind is RequestOutputKind.DELTA or len(outputs) == 1


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


async def test_a_request_that_cannot_be_started_ends_no_other(
    llm: AsyncLLM, plain: PlainDecoding, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = asyncio.create_task(collect(llm, PROMPTS[0], LONG, "good"))
    make = llm._engine._intake.make

    def fails(request_id: str, *rest: Any) -> Any:
        if request_id == "bad":
            raise Injected("a bug")
        return make(request_id, *rest)

    monkeypatch.setattr(llm._engine._intake, "make", fails)
    with pytest.raises(Injected):
        await collect(llm, PROMPTS[1], LONG, "bad")
    assert_same((await good)[-1:], plain.outputs(PROMPTS[:1], [LONG]))
    assert any("bad could not be started" in record.getMessage() for record in caplog.records)
    await settled(llm)


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_what_a_slow_reader_has_missed_comes_as_one(
    kind: RequestOutputKind, llm: AsyncLLM, plain: PlainDecoding
) -> None:
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=60, logprobs=1, output_kind=kind)
    (expected,) = plain.outputs([PROMPTS[2]], [params])
    stream = llm.generate(PROMPTS[2], params, request_id="slow")
    outputs = [await anext(stream)]
    await finished(llm)
    outputs += await rest(stream)
    assert len(outputs) == (1 if kind is RequestOutputKind.FINAL_ONLY else 2)
    if kind is RequestOutputKind.DELTA:
        outputs = [join(*outputs)]
    assert_same(outputs[-1:], [expected])
    await settled(llm)


async def finished(llm: AsyncLLM) -> None:
    """Waits until nothing runs, whoever has read what."""
    async with asyncio.timeout(PATIENCE_S):
        while (await llm.snapshot()).running:
            await asyncio.sleep(0.005)


async def test_who_leaves_is_aborted_once_and_the_id_is_free(
    llm: AsyncLLM, plain: PlainDecoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator closed before its first output, after it, and at the end."""
    aborted: list[str] = []
    abort = llm._engine.abort
    monkeypatch.setattr(llm._engine, "abort", lambda name: (aborted.append(name), abort(name))[1])
    unread = llm.generate(PROMPTS[0], LONG, request_id="a")
    await unread.aclose()  # never started
    for _ in range(5):
        stream = llm.generate(PROMPTS[0], LONG, request_id="a")
        await anext(stream)
        await stream.aclose()
        waiting = asyncio.create_task(collect(llm, PROMPTS[0], LONG, "a"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    last = await collect(llm, PROMPTS[0], LONG, "a")
    assert_same(last[-1:], plain.outputs(PROMPTS[:1], [LONG]))
    await settled(llm)
    assert 5 <= len(aborted) <= 10  # those that left before the engine took them up need no abort


async def test_requests_of_an_event_loop_that_was_closed_are_given_up(llm: AsyncLLM, plain: PlainDecoding) -> None:
    """As after a crash: nobody closes the generators, and nobody is there to be told."""
    streams = [llm.generate(prompt, LONG, request_id=f"lost-{i}") for i, prompt in enumerate(PROMPTS)]

    def crash() -> None:
        loop = asyncio.new_event_loop()
        for stream in streams[:4]:
            loop.run_until_complete(anext(stream))
        loop.close()

    good = asyncio.create_task(collect(llm, PROMPTS[0], LONG, "good"))
    await asyncio.to_thread(crash)
    assert_same((await good)[-1:], plain.outputs(PROMPTS[:1], [LONG]))
    await settled(llm)
    assert llm.healthy


class Death:
    """Makes the target pass fail, once it is told to; until then the engine's thread is held there."""

    def __init__(self, llm: AsyncLLM, *, after: int) -> None:
        self.reached, self.due = threading.Event(), threading.Event()
        verifier, loop = verifier_of(llm), llm._engine._loop
        verify, calls = verifier.verify, iter(range(10**6))
        engine_waits = threading.Event()
        """Its thread takes no more commands. Where a step runs in another one, that is so only a moment later."""

        def dies(*args: Any) -> Any:
            if next(calls) < after:
                return verify(*args)
            engine_waits.wait(PATIENCE_S)
            self.reached.set()
            self.due.wait(PATIENCE_S)
            raise Injected("the target pass failed")

        verifier.verify = dies
        if isinstance(loop, OverlappedLoop):
            finish, finishes = loop._finish, iter(range(10**6))

            def waits(*args: Any) -> Any:
                if next(finishes) == after:
                    engine_waits.set()
                return finish(*args)

            loop._finish = waits  # type: ignore[method-assign]
        else:
            engine_waits.set()


async def test_a_dying_engine_answers_everyone_at_once(
    tiny: Pair, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Open streams, requests and questions still in the queue, those who wait for the end, and those who come late."""
    with open_async_llm(tiny.target, **options) as llm:
        death = Death(llm, after=8)
        impatient = asyncio.create_task(llm.wait_ended())
        ends = [asyncio.create_task(llm.wait_ended()) for _ in range(3)]
        streams = [asyncio.create_task(collect(llm, prompt, LONG, str(i))) for i, prompt in enumerate(PROMPTS)]
        await asyncio.to_thread(death.reached.wait, PATIENCE_S)
        impatient.cancel()
        queued = [asyncio.create_task(collect(llm, PROMPTS[0], LONG, f"queued-{i}")) for i in range(3)]
        asked = [asyncio.create_task(llm.snapshot()), asyncio.create_task(llm.verify_integrity())]
        await asyncio.sleep(0)
        await llm.abort("0")
        assert llm.healthy
        assert not ends[0].done()
        death.due.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([*streams, *queued, *asked])
            reasons = [*(await asyncio.gather(*ends)), await llm.wait_ended()]
        errors = [task.exception() for task in (*streams, *queued, *asked)]
        assert len(set(map(id, errors + reasons))) == len(errors + reasons)  # no error has two raisers
        for error in (*errors, *reasons):
            assert isinstance(error, DynaspecError)
            assert "the target pass failed" in str(error)
            assert isinstance(error.__cause__, Injected)
        assert not llm.healthy
        late = [collect(llm, PROMPTS[0], LONG, "late"), llm.abort("0"), llm.snapshot(), llm.verify_integrity()]
        for call in late:
            with pytest.raises(DynaspecError, match="stopped"):
                await call
        assert llm.stats().emitted > 0
    assert any("the engine has stopped" in record.getMessage() for record in caplog.records)
    assert not any(thread.name.startswith("dynaspec") for thread in threading.enumerate())


async def test_closing_ends_what_is_running(tiny: Pair, options: dict[str, Any]) -> None:
    """From several threads at once, and again."""
    with open_async_llm(tiny.target, **options) as llm:
        stream = llm.generate(PROMPTS[0], LONG, request_id="a")
        await anext(stream)
        await asyncio.gather(*(asyncio.to_thread(llm.close) for _ in range(3)))
        llm.close()
        with pytest.raises(DynaspecError, match="closed"):
            await rest(stream)
        with pytest.raises(DynaspecError, match="stopped"):
            await collect(llm, PROMPTS[0], LONG, "late")
        assert "closed" in str(await llm.wait_ended())
        assert not llm.healthy


async def test_an_idle_engine_is_closed_at_once(tiny: Pair, options: dict[str, Any]) -> None:
    with open_async_llm(tiny.target, **options) as llm:
        ended = asyncio.create_task(llm.wait_ended())
        await asyncio.to_thread(llm.close)
        async with asyncio.timeout(PATIENCE_S):
            assert "closed" in str(await ended)
