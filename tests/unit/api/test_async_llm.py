from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dynaspec.api import AsyncLLM
from dynaspec.api.options import AsyncEngineArgs
from dynaspec.contract.errors import DynaspecError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from unit.api.built import GREEDY, Built, tokens
from unit.engine.engines import TOKENIZER


@pytest.fixture
def server(built: Built) -> Iterator[AsyncLLM]:
    one = AsyncLLM("fake", async_scheduling=True)
    yield one
    one.close()


async def collect(
    server: AsyncLLM, name: str, prompt: Any = "abc", params: SamplingParams = GREEDY
) -> list[RequestOutput]:
    return [output async for output in server.generate(prompt, params, request_id=name)]


async def test_streams_of_several_callers(server: AsyncLLM) -> None:
    streams = await asyncio.gather(*(collect(server, f"r{i}", f"prompt {i % 3}") for i in range(7)))
    for i, outputs in enumerate(streams):
        assert [output.request_id for output in outputs] == [f"r{i}"] * len(outputs)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert tokens(outputs[-1]) == tokens(streams[i % 3][-1])


async def test_deltas(server: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, output_kind=RequestOutputKind.DELTA)
    deltas = await collect(server, "a", params=params)
    whole = await collect(server, "b")
    assert sum(map(tokens, deltas), ()) == tokens(whole[-1])


async def test_a_bad_request_hurts_nobody_else(server: AsyncLLM) -> None:
    good = asyncio.create_task(collect(server, "good"))
    with pytest.raises(RequestError, match="empty"):
        await collect(server, "bad", "")
    assert (await good)[-1].finished
    assert server.healthy


async def test_a_caller_that_leaves_early_frees_its_request(server: AsyncLLM, built: Built) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200)
    stream = server.generate("abc", params, request_id="a")
    await anext(stream)
    await stream.aclose()
    assert (await collect(server, "a"))[-1].finished  # the id is free again
    assert not built.rig.scheduler.unfinished


async def test_an_abort_from_outside_ends_the_stream(server: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200)
    stream = server.generate("abc", params, request_id="a")
    await anext(stream)
    await server.abort("a")
    *_, last = [output async for output in stream]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    await server.abort("nobody")
    assert server.healthy


async def test_an_error_of_the_engine_reaches_everyone(
    server: AsyncLLM, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(built.rig.target, "forward", fail)
    results = await asyncio.gather(*(collect(server, name) for name in "abc"), return_exceptions=True)
    assert all(isinstance(result, DynaspecError) for result in results)
    assert not server.healthy
    with pytest.raises(DynaspecError, match="stopped"):
        await collect(server, "later")


async def test_after_closing_nothing_is_taken(built: Built) -> None:
    server = AsyncLLM("fake")
    params = SamplingParams(temperature=0.0, max_tokens=200)
    stream = server.generate("abc", params, request_id="a")
    await anext(stream)
    server.close()
    with pytest.raises(DynaspecError):
        _ = [output async for output in stream]
    with pytest.raises(DynaspecError, match="stopped"):
        await collect(server, "later")
    assert TOKENIZER.vocab_size == built.rig.vocab


async def test_forms_are_compiled_beside_the_engines_thread(server: AsyncLLM, built: Built) -> None:
    threads: list[str] = []
    honest = built.engine.prepare

    def prepare(params: SamplingParams) -> None:
        threads.append(threading.current_thread().name)
        honest(params)

    built.engine.prepare = prepare  # type: ignore[method-assign]
    good = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    outputs = await collect(server, "a", params=good)
    assert outputs[-1].outputs[0].text in ("yes", "no")
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    with pytest.raises(RequestError, match="unclosed group"):
        await collect(server, "b", params=bad)
    await collect(server, "c")
    assert len(threads) == 2
    assert "dynaspec-engine" not in threads


async def test_built_of_vllm_s_arguments(built: Built) -> None:
    args = AsyncEngineArgs(model="fake", async_scheduling=True, enable_log_requests=False)
    async with AsyncLLM.from_engine_args(args) as server:
        assert (await collect(server, "a"))[-1].finished
    with pytest.raises(TypeError, match="gpu_memory_utilisation"):
        AsyncEngineArgs(model="fake", gpu_memory_utilisation=0.5)


def test_shutdown_is_vllms_name_of_close(built: Built) -> None:
    server = AsyncLLM("fake")
    assert server.healthy
    server.shutdown()
    assert not server.healthy
