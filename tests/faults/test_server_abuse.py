"""Connections that do not behave, over real sockets: others are served meanwhile, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from dynaspec import AsyncLLM
from support.checkpoints import Pair
from support.http_server import PATIENCE_S, Serving, serving
from support.raw_client import RawClient, answer_of, head, raw_client, whole
from unit.server.serving import events_of, texts_of

PATH = "/v1/completions"
SHORT = {"prompt": "1 2 3 4", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "the quick brown fox", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
STREAM = LONG | {"stream": True, "logprobs": 20}
"""Of more than 100 KB."""
SMALL = 4096
"""Bytes of a socket's buffer: with both ends so small, what a client does not read is soon the server's problem."""


@pytest.fixture(scope="module")
def llm(tiny: Pair) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        tiny.target,
        speculative_config={"model": tiny.drafter, "policy": "constant", "num_speculative_tokens": 3},
        max_num_seqs=8,
    )
    yield engine
    engine.close()


async def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(patience_s):
        while not condition():
            await asyncio.sleep(0.01)


async def idle(llm: AsyncLLM) -> None:
    """Returns when the engine has nothing left to do."""
    async with asyncio.timeout(PATIENCE_S):
        while (seen := await llm.snapshot()).running or seen.waiting:
            await asyncio.sleep(0.01)


async def post(server: Serving, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        return await client.post(PATH, json=body)


async def assert_serves(server: Serving) -> None:
    """It answers, and nobody has left a place taken."""
    response = await post(server, SHORT)
    assert response.status_code == 200, response.text
    await until(lambda: server.state.admission.active == 0)
    await idle(server.state.llm)


@asynccontextmanager
async def stalled(server: Serving) -> AsyncIterator[RawClient]:
    """A client that has asked for a stream and does not read it; the server can send no more of it."""
    await post(server, SHORT)  # it has begun to listen
    server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    async with raw_client(server.port, receive_buffer=SMALL) as client:
        await client.send(whole(PATH, STREAM))
        await until(lambda: any(connection.flow.write_paused for connection in connections(server)))
        yield client


def connections(server: Serving) -> list[Any]:
    return list(server.server.server_state.connections)


async def test_a_client_that_stops_reading_holds_up_nobody_and_costs_little(llm: AsyncLLM) -> None:
    async with serving(llm) as server:
        expected = (await post(server, LONG)).json()["choices"][0]["text"]
        async with stalled(server) as client:
            await asyncio.gather(*[assert_answer(server) for _ in range(8)])
            await idle(llm)  # what is not read is not waited for
            assert max(connection.transport.get_write_buffer_size() for connection in connections(server)) < 2**17
            assert server.state.admission.active == 1
            status, _, body = answer_of(await client.rest())
            assert status == 200
            assert len(body) > 100_000
            assert texts_of(events_of(body.decode())) == {0: expected}
        await assert_serves(server)


async def assert_answer(server: Serving) -> None:
    assert (await post(server, SHORT)).status_code == 200


async def test_a_client_that_stops_reading_and_goes_leaves_its_place(llm: AsyncLLM) -> None:
    async with serving(llm) as server:
        async with stalled(server) as client:
            client.reset()
        await assert_serves(server)


async def test_a_client_that_stops_reading_does_not_keep_its_place_for_ever(llm: AsyncLLM) -> None:
    async with serving(llm, read_timeout_s=1) as server, stalled(server):
        await until(lambda: server.state.admission.active == 0, patience_s=4)
        assert not connections(server)
        await assert_serves(server)


async def test_unfinished_requests_hold_up_nobody_and_are_given_up(llm: AsyncLLM) -> None:
    heads = head(PATH, "Content-Length: 1000")[:-10]
    bodies = head(PATH, "Content-Type: application/json", "Content-Length: 1000") + b'{"prompt": "'
    async with serving(llm, read_timeout_s=1.5) as server, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(raw_client(server.port)) for _ in range(60)]
        for i, client in enumerate(clients):
            await client.send((b"", heads, bodies)[i % 3])
        await assert_serves(server)
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*[client.rest() for client in clients])
        assert set(answers[0::3]) == set(answers[1::3]) == {b""}
        for answer in answers[2::3]:
            status, _, body = answer_of(answer)
            assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        await assert_serves(server)


@pytest.mark.parametrize("when", ["in the headers", "in the body", "before the answer", "in a stream"])
async def test_a_connection_that_breaks_leaves_nothing_behind(llm: AsyncLLM, when: str) -> None:
    sent = {
        "in the headers": head(PATH)[:-10],
        "in the body": head(PATH, "Content-Length: 1000") + b"{",
        "before the answer": whole(PATH, LONG),
        "in a stream": whole(PATH, STREAM),
    }[when]
    async with serving(llm) as server:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(raw_client(server.port)) for _ in range(6)]
            for client in clients:
                await client.send(sent)
                if when == "in a stream":
                    assert await client.read()
            for client in clients:
                client.reset()
        await assert_serves(server)
        await llm.verify_integrity()


@pytest.mark.parametrize("told", [True, False], ids=["with a length", "in chunks"])
async def test_a_body_that_is_too_large_is_refused_while_it_comes(llm: AsyncLLM, told: bool) -> None:
    piece = b"x" * 2**20
    async with serving(llm, read_timeout_s=1.5) as server, raw_client(server.port) as client:
        await client.send(head(PATH, f"Content-Length: {11 * 2**20}" if told else "Transfer-Encoding: chunked"))
        for _ in range(11):
            await client.send(piece if told else b"100000\r\n" + piece + b"\r\n")
        status, _, body = answer_of(await client.rest())
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        await assert_serves(server)


async def test_a_body_as_large_as_may_be_is_read(llm: AsyncLLM) -> None:
    text = '{"prompt": "' + "x" * (10 * 2**20 - 14) + '"}'
    async with serving(llm) as server, raw_client(server.port) as client:
        await client.send(head(PATH, "Content-Type: application/json", f"Content-Length: {len(text)}"))
        await client.send(text.encode())
        status, _, body = answer_of(await client.rest())
        assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")


NO_HTTP: dict[str, bytes] = {
    "tls": bytes.fromhex("160301020001000001fc0303"),
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "nul in a header": head("/health", "X: a\0b", method="GET"),
    "line feed in the path": b"GET /hea\nlth HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "two hosts": head("/health", "Host: other", method="GET"),
    "two lengths": head(PATH, "Content-Length: 1", "Content-Length: 2") + b"{}",
    "a length below zero": head(PATH, "Content-Length: -1"),
    "a length in other digits": head(PATH, "Content-Length: 0x10"),
    "another coding": head(PATH, "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n",
    "a bad chunk": head(PATH, "Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n",
    "endless headers": head("/health", *[f"X-{i}: {'x' * 1000}" for i in range(70)], method="GET")[:-10],
    "an endless path": head("/" + "x" * 70_000, method="GET")[:-10],
}


@pytest.mark.parametrize("kind", NO_HTTP)
async def test_what_is_no_http_is_a_bad_request(llm: AsyncLLM, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    async with serving(llm) as server:
        async with raw_client(server.port) as client, asyncio.timeout(PATIENCE_S):
            await client.send(NO_HTTP[kind])
            answers = await client.rest()
        last = answers[answers.rindex(b"HTTP/1.1 4") :]  # HTTP/2 begins with what looks like a request of its own
        status, headers, body = answer_of(last)
        assert (status, headers.get("connection")) == (400, "close"), answers
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        await assert_serves(server)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_nonsense_after_an_answer_ends_the_connection_alone(llm: AsyncLLM) -> None:
    begun = head(PATH, "Transfer-Encoding: chunked").replace(b"Connection: close\r\n", b"")
    async with serving(llm, max_request_bytes=1024) as server:
        async with raw_client(server.port) as client, asyncio.timeout(PATIENCE_S):
            await client.send(begun + b"800\r\n" + b"x" * 2048 + b"\r\n")
            assert b" 413 " in await client.read()
            await client.send(b"zz\r\n")
            await client.rest()
        await assert_serves(server)


async def test_a_length_beside_chunks_does_not_hide_a_request(llm: AsyncLLM) -> None:
    """Chunks count, as everywhere: what a proxy that counts the length takes for the body must not be a request."""
    hidden = head("/hidden", method="GET")
    async with serving(llm) as server, raw_client(server.port) as client:
        length = len(b"0\r\n\r\n") + len(hidden)
        await client.send(head(PATH, "Transfer-Encoding: chunked", f"Content-Length: {length}") + b"0\r\n\r\n" + hidden)
        assert (await client.rest()).count(b"HTTP/1.1 ") == 1


async def test_requests_in_a_row_are_answered_in_order(llm: AsyncLLM) -> None:
    one = whole(PATH, SHORT | {"max_tokens": 1}).replace(b"Connection: close\r\n", b"")
    async with serving(llm) as server, raw_client(server.port) as client, asyncio.timeout(PATIENCE_S):
        await client.send(one * 20 + head("/version", method="GET"))
        answers = await client.rest()
        assert answers.count(b"HTTP/1.1 200 OK") == 21
        assert answers.rindex(b'"version"') > answers.rindex(b'"choices"')


async def test_a_change_of_protocol_is_not_made(llm: AsyncLLM) -> None:
    upgrade = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    async with serving(llm) as server, raw_client(server.port) as client:
        await client.send(head("/v1/models", *upgrade, method="GET").replace(b"close", b"upgrade, close"))
        status, _, body = answer_of(await client.rest())
        assert (status, json.loads(body)["object"]) == (200, "list")
