"""``BoundedConnection``: a client that does not send what it owes is cut off, and nobody else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from dynaspec.server.run import BoundedConnection

PATIENCE_S = 60.0
LIMIT_S = 0.25
LONGER_S = 0.4
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, but for ``/early``."""
    if scope["path"] != "/early":
        await Request(scope, receive).body()
    if scope["path"] == "/slow":
        await asyncio.sleep(LONGER_S)
    await PlainTextResponse("ok")(scope, receive, send)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Of a server whose clients have a quarter of a second."""
    config = uvicorn.Config(
        app,
        port=0,
        http=partial(BoundedConnection, timeout_s=LIMIT_S),
        lifespan="off",
        log_config=None,
        ws="none",
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def all_of(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Sends the parts, and returns what comes until the server closes the connection."""
    async with connection(port) as (reader, writer):
        with suppress(ConnectionError):
            await send(writer, parts, pause_s)
            return await reader.read()
    return b""


async def first_of(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Sends the parts, and returns what has come then, or comes first."""
    async with connection(port) as (reader, writer):
        await send(writer, parts, pause_s)
        return await reader.read(4096)


async def send(writer: asyncio.StreamWriter, parts: Sequence[bytes], pause_s: float) -> None:
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(pause_s)


async def test_who_sends_nothing_is_cut_off(port):
    assert await all_of(port) == b""


async def test_who_does_not_finish_the_headers_is_cut_off(port):
    assert await all_of(port, REQUEST[:20]) == b""


async def test_bytes_now_and_then_do_not_help(port):
    pieces = [REQUEST[i : i + 1] for i in range(len(REQUEST) - 1)]
    assert await all_of(port, *pieces, pause_s=0.05) == b""


async def test_nor_does_an_earlier_request(port):
    answer = await all_of(port, REQUEST, REQUEST[:20])
    assert answer.count(b"200 OK") == 1


async def test_who_has_been_answered_must_finish_the_body(port):
    begun = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx"
    answer = await all_of(port, begun)
    assert answer.count(b"200 OK") == 1


async def test_an_answered_body_that_arrives_is_followed_by_the_next_request(port):
    begun = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"
    answer = await all_of(port, begun, b"abc" + REQUEST + REQUEST[:5])
    assert answer.count(b"200 OK") == 2


async def test_an_answer_may_take_longer(port):
    assert b"200 OK" in await first_of(port, b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")


async def test_a_body_that_is_read_may_take_longer(port):
    begun = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
    assert b"200 OK" in await first_of(port, begun, b"a", b"b", pause_s=LONGER_S)


async def test_an_idle_connection_may_rest(port):
    assert (await first_of(port, REQUEST, b"", REQUEST, pause_s=LONGER_S)).count(b"200 OK") == 2
