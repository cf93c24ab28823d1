from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI

from dynaspec import AsyncLLM
from dynaspec.contract.errors import DynaspecError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.server.generation import Generation
from dynaspec.server.state import ServerState
from unit.server.serving import Client, error_of, events_of, make_app
from unit.server.wire import connected, gated

PATHS = {
    "/v1/completions": {"prompt": "1 2 3 4"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "1 2 3 4"}]},
}
LONG = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def app(llm: AsyncLLM) -> FastAPI:
    return make_app(llm)


def state_of(app: FastAPI) -> ServerState:
    state: ServerState = app.state.dynaspec
    return state


async def idle(app: FastAPI) -> None:
    """Returns when the engine has nothing left to do."""
    while (snapshot := await state_of(app).llm.snapshot()).running or snapshot.waiting:
        await asyncio.sleep(0.001)


async def test_a_chunk_for_every_step(app: FastAPI, llm: AsyncLLM, path: str) -> None:
    with gated(llm) as gate:
        async with connected(app, path, stream=True, **PATHS[path], **LONG) as wire:
            gate.allow(1)
            if path == "/v1/chat/completions":
                assert b'"role":"assistant"' in await wire.chunk()
            first = await wire.chunk()
            gate.allow(1)
            second = await wire.chunk()
            for chunk in (first, second):
                assert chunk.startswith(b"data: {")
                assert chunk.endswith(b"}\n\n")
            assert wire.messages.empty()


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_is_forgotten_at_once(app: FastAPI, llm: AsyncLLM, path: str, stream: bool) -> None:
    emitted = llm.stats().emitted
    with gated(llm) as gate:
        async with connected(app, path, stream=stream, **PATHS[path], **LONG) as wire:
            gate.allow(3)
            if stream:
                await wire.chunk()
            while llm.stats().emitted < emitted + 1:
                await asyncio.sleep(0.001)
            wire.leave()
            await wire.done
        assert state_of(app).admission.active == 0
    await idle(app)
    assert llm.stats().emitted - emitted < 20


async def test_who_leaves_before_the_first_token_is_forgotten(app: FastAPI, llm: AsyncLLM, path: str) -> None:
    emitted = llm.stats().emitted
    with gated(llm):
        async with connected(app, path, stream=True, **PATHS[path], **LONG) as wire:
            while state_of(app).admission.active == 0:
                await asyncio.sleep(0.001)
            wire.leave()
            await wire.done
        [message] = [wire.messages.get_nowait() for _ in range(wire.messages.qsize())][:1]
        assert message["status"] == 499
    await idle(app)
    assert llm.stats().emitted - emitted < 20


async def test_all_prompts_of_who_leaves_are_forgotten(app: FastAPI, llm: AsyncLLM) -> None:
    body = {"prompt": ["a", "b", "c"], "n": 2, "seed": 1, **LONG, "temperature": 1}
    async with connected(app, "/v1/completions", stream=True, **body) as wire:
        await wire.chunk()
        assert state_of(app).admission.active == 6
        wire.leave()
        await wire.done
    assert state_of(app).admission.active == 0
    await idle(app)


async def test_who_reads_slowly_gets_more_at_a_time(app: FastAPI, llm: AsyncLLM) -> None:
    """And everything; who wrote what is still told."""
    body = {"prompt": "1 2 3 4", "speculation": {"metrics": "detailed"}, "return_token_ids": True, **LONG}
    whole = events_of((await Client(app).post("/v1/completions", stream=True, **body)).text)
    with gated(llm) as gate:
        async with connected(app, "/v1/completions", stream=True, **body) as wire:
            gate.allow(1)
            chunks = [await wire.chunk()]
            wire.messages = asyncio.Queue(maxsize=1)  # no more is taken until it is read
            gate.open = True
            await idle(app)
            while chunks[-1] != b"data: [DONE]\n\n":
                chunks.append(await wire.chunk())
    slow = events_of(b"".join(chunks).decode())
    assert len(slow) < len(whole)

    def written(events: list[dict[str, Any]]) -> list[Any]:
        return [token for event in events for token in event["choices"][0]["token_sources"]]

    assert written(slow) == written(whole)


async def test_usage_comes_last_or_all_along(client: Client, path: str) -> None:
    body = {**PATHS[path], "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    *chunks, last = await client.stream(path, stream_options={"include_usage": True}, **body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert not any("usage" in chunk for chunk in chunks)
    chunks = await client.stream(path, stream_options={"continuous_usage_stats": True}, **body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    assert counts == sorted(set(counts))
    assert counts[-1] == 12
    assert not any("usage" in chunk for chunk in await client.stream(path, **body))


async def test_streams_are_not_to_be_kept_or_buffered(client: Client, path: str) -> None:
    response = await client.post(path, stream=True, **PATHS[path])
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers


def failing_after(outputs: int, error: Exception) -> Any:
    """Stands for ``AsyncLLM.generate``: some outputs, then an error."""
    generate = AsyncLLM.generate

    async def failing(self: AsyncLLM, *args: Any, **kwargs: Any) -> AsyncIterator[RequestOutput]:
        left = outputs
        async for output in generate(self, *args, **kwargs):
            if left == 0:
                raise error
            left -= 1
            yield output

    return failing


async def test_an_error_in_the_middle_ends_the_stream(
    client: Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = DynaspecError("the engine has stopped: out of order; expected a running one")
    monkeypatch.setattr(AsyncLLM, "generate", failing_after(2, error))
    response = await client.post(path, stream=True, **PATHS[path], **LONG)
    assert response.status_code == 200
    *chunks, last = events_of(response.text)
    assert all("choices" in chunk for chunk in chunks)
    assert last["error"]["code"] == "engine_stopped"


async def test_an_error_at_the_beginning_is_told_by_the_status(
    client: Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = DynaspecError("the engine has stopped: out of order; expected a running one")
    monkeypatch.setattr(AsyncLLM, "generate", failing_after(0, error))
    for stream in (False, True):
        response = await client.post(path, stream=stream, **PATHS[path], **LONG)
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_stopped"


async def test_a_bug_ends_the_stream_without_its_words(
    app: FastAPI, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncLLM, "generate", failing_after(1, ZeroDivisionError("secret")))
    async with connected(app, path, stream=True, **PATHS[path], **LONG) as wire:
        chunk = b"data"
        while b"error" not in chunk:
            chunk = await wire.chunk()
        await wire.done
    assert json.loads(chunk.removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert b"secret" not in chunk
    assert state_of(app).admission.active == 0


async def test_an_answer_that_takes_too_long(llm: AsyncLLM, path: str) -> None:
    app = make_app(llm, request_timeout_s=0.05)
    client = Client(app)
    with gated(llm):
        for stream in (False, True):
            response = await client.post(path, stream=stream, **PATHS[path], **LONG)
            assert response.status_code == 504
            assert error_of(response)["code"] == "request_timeout"
        assert state_of(app).admission.active == 0
    await client.close()
    await idle(app)


async def test_a_stream_that_takes_too_long(llm: AsyncLLM, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Generation.started

    async def too_late(self: Generation) -> None:
        await started(self)
        self._deadline = 0.0

    monkeypatch.setattr(Generation, "started", too_late)
    client = Client(make_app(llm, request_timeout_s=3600))
    *chunks, last = await client.stream(path, **PATHS[path], **LONG)
    assert chunks
    assert last["error"]["code"] == "request_timeout"
    await client.close()


async def test_a_full_server_says_so(app: FastAPI, llm: AsyncLLM, path: str) -> None:
    client = Client(app)
    async with state_of(app).admission.slot(64):
        for stream in (False, True):
            response = await client.post(path, stream=stream, **PATHS[path])
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
    await client.ask(path, **PATHS[path])
    await client.close()


async def test_a_request_that_is_refused_leaves_no_trace(app: FastAPI, llm: AsyncLLM) -> None:
    client = Client(app)
    for stream in (False, True):
        await client.refused("/v1/completions", prompt=[[1], [2], [320]], stream=stream)
    assert state_of(app).admission.active == 0
    await idle(app)
    await llm.verify_integrity()
    await client.close()


@pytest.mark.parametrize("headers", [{}, {"X-Request-Id": "same"}], ids=["in the body", "in a header"])
async def test_one_id_at_a_time(app: FastAPI, llm: AsyncLLM, headers: dict[str, str]) -> None:
    client = Client(app)
    again = json.dumps({"prompt": "x"} | LONG | ({} if headers else {"request_id": "same"})).encode()
    with gated(llm) as gate:
        async with connected(app, "/v1/completions", prompt="x", stream=True, request_id="same", **LONG) as wire:
            gate.allow(1)
            await wire.chunk()
            refused = asyncio.ensure_future(client.send("/v1/completions", again, **headers))
            gate.open = True
            response = await refused
            assert response.status_code == 400
            assert "already running" in error_of(response)["message"]
    await client.close()


async def test_the_log_learns_how_many_tokens_there_were(
    app: FastAPI, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dynaspec.server.access")
    client = Client(app)
    for stream in (False, True):
        await client.post(path, stream=stream, **PATHS[path], **LONG)
    await client.refused("/v1/completions", prompt=[320])
    whole, streamed, refused = (vars(record)["dynaspec_fields"] for record in caplog.records)
    assert whole["completion_tokens"] == streamed["completion_tokens"] == 200
    assert whole["prompt_tokens"] == streamed["prompt_tokens"] > 0
    assert "prompt_tokens" not in refused
    await client.close()
