"""One request, the events of its answer, and its times."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web

from dynaspec.bench.serving.client import BACKENDS, EventStream, Usage, send
from support.fake_server import (
    DONE,
    Call,
    FakeServer,
    as_event,
    broken,
    delta,
    refused,
    root,
    running,
    token,
    usage,
    words,
)

STREAM = b': hello\r\n\r\ndata: {"a": 1}\n\nevent: x\ndata:two\ndata: lines\n\n\n\ndata: [DONE]\r\n\r\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_do_not_depend_on_how_bytes_arrive(size):
    stream = EventStream()
    found = [event for i in range(0, len(STREAM), size) for event in stream.feed(STREAM[i : i + size])]
    assert found == EVENTS
    assert stream.close() == []


def test_the_last_blank_line_may_be_missing():
    stream = EventStream()
    assert stream.feed(b"data: last") == []
    assert stream.close() == [b"last"]


async def ask(fake: FakeServer, backend: str = "openai", clock=None):
    api = BACKENDS[backend]
    async with running(fake) as server, aiohttp.ClientSession() as session:
        body = api.body("fake", "hello", 5)
        more = {} if clock is None else {"clock": clock}
        return await send(session, root(server) + api.path, api, body, {"X-Request-Id": "r"}, **more)


async def test_times_are_those_of_chunks():
    """Every reading of the clock lets the server send its next event."""
    go_on = asyncio.Semaphore(0)
    ticks = iter(range(100))

    def clock():
        go_on.release()
        return float(next(ticks))

    async def answer(call: Call):
        response = await call.stream([])
        for event in (token("a"), token(""), token("b c", "stop"), usage(3, 4, cached=1)):
            await go_on.acquire()
            await response.write(as_event(event))
        await response.write(DONE)
        return response

    record = await ask(FakeServer(answer=answer), clock=clock)
    assert record.failure is None
    assert record.chunks_s == (1.0, 2.0, 3.0)
    assert (record.start_s, record.end_s) == (0.0, 3.0), "usage does not prolong a request"
    assert record.usage == Usage(3, 4, 1)
    assert record.output_tokens == 4
    assert record.text == "ab c"
    assert record.streamed
    assert record.ttft_s == 1.0
    assert record.e2el_s == 3.0
    assert record.itl_s == (1.0, 1.0)
    assert record.tpot_s == pytest.approx(2 / 3)


async def test_the_request():
    fake = FakeServer()
    await ask(fake)
    (call,) = fake.calls
    assert call.body == {
        "model": "fake",
        "prompt": "hello",
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert call.request.headers["X-Request-Id"] == "r"


async def test_chat():
    async def answer(call: Call):
        events = [delta(role="assistant", content=""), delta(content="a"), delta(reasoning_content="b"), delta("stop")]
        return await call.stream([*events, usage(3, 4), DONE])

    fake = FakeServer(answer=answer)
    record = await ask(fake, "openai-chat")
    assert record.failure is None
    assert len(record.chunks_s) == 3, "the opening event has no token"
    assert record.text == "a"
    assert fake.calls[0].body["messages"] == [{"role": "user", "content": "hello"}]
    assert fake.calls[0].body["max_completion_tokens"] == 5


async def test_without_usage_chunks_are_counted():
    async def answer(call: Call):
        return await call.stream([token("a"), token("b", "length"), DONE])

    record = await ask(FakeServer(answer=answer))
    assert record.failure is None
    assert record.usage is None
    assert record.output_tokens == 2


async def test_an_answer_in_one_piece():
    async def answer(call: Call):
        whole = token("a b c", "length") | {"usage": {"prompt_tokens": 2, "completion_tokens": 3}}
        return web.json_response(whole)

    record = await ask(FakeServer(answer=answer))
    assert record.failure is None
    assert not record.streamed
    assert record.output_tokens == 3
    assert record.ttft_s == record.e2el_s
    assert record.tpot_s is None


async def test_speculation_of_the_choice():
    counts = {"steps": 2, "drafts": 2, "drafted": 6, "accepted": 3}
    record = await ask(FakeServer(answer=words("a", "b", tokens=5, speculation=counts)))
    assert record.speculation == counts


async def half(call: Call):
    return await call.stream([token("a")])


async def silent(call: Call):
    return await call.stream([usage(3, 0), DONE])


async def gibberish(call: Call):
    return await call.stream([b"data: {nonsense\n\n"])


async def odd(call: Call):
    return await call.stream([{"choices": ["x"]}])


async def failing(call: Call):
    return await call.stream([token("a"), {"error": {"message": "the engine has stopped", "type": "server_error"}}])


async def html(call: Call):
    return web.Response(status=502, text="<html>  bad\n gateway </html>")


async def fastapi(call: Call):
    return web.json_response({"detail": "Not Found"}, status=404)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (refused(400, "the prompt is too long"), "HTTP 400 invalid_request_error", "the prompt is too long"),
        (html, "HTTP 502", "<html> bad gateway </html>"),
        (fastapi, "HTTP 404 error", "Not Found"),
        (broken, "connection lost", ""),
        (half, "ended early", "before a finish reason"),
        (silent, "no output", "without a token"),
        (gibberish, "unreadable answer", "no JSON: {nonsense"),
        (odd, "unreadable answer", "no known form"),
        (failing, "error in the stream: server_error", "the engine has stopped"),
    ],
)
async def test_failures(answer, kind, message):
    record = await ask(FakeServer(answer=answer))
    assert record.failure is not None
    assert record.failure.kind == kind
    assert message in record.failure.message


async def test_nobody_there():
    server = running(FakeServer())
    await server.start_server()
    url = root(server) + "/v1/completions"
    await server.close()
    async with aiohttp.ClientSession() as session:
        record = await send(session, url, BACKENDS["openai"], {}, {})
    assert record.failure is not None
    assert record.failure.kind == "not connected"
