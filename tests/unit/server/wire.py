"""One request over ASGI itself, and an engine that steps only when it may: what happens between two steps, and when a
client leaves, can be looked at."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest import mock

from fastapi import FastAPI

from dynaspec import AsyncLLM
from dynaspec.contract.outputs import RequestOutput


class Wire:
    """A connection with one request on it."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self.messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._left = asyncio.Event()
        self._request: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(body).encode()}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"1")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.done = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """The client closes the connection."""
        self._left.set()

    async def chunk(self) -> bytes:
        """The next piece of the answer's body."""
        while True:
            coming = asyncio.ensure_future(self.messages.get())
            await asyncio.wait({coming, self.done}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                raise AssertionError(f"the answer ended: {self.done}")
            message = coming.result()
            if message["type"] == "http.response.body":
                body: bytes = message["body"]
                return body

    async def _receive(self) -> dict[str, Any]:
        if self._request:
            return self._request.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.messages.put(message)


@asynccontextmanager
async def connected(app: FastAPI, path: str, **body: Any) -> AsyncIterator[Wire]:
    wire = Wire(app, path, body)
    try:
        yield wire
    finally:
        wire.leave()
        await asyncio.gather(wire.done, return_exceptions=True)


class Gate:
    """Lets an engine step."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self.open = False

    def allow(self, steps: int) -> None:
        self._steps.release(steps)

    def wait(self) -> None:
        while not self.open and not self._steps.acquire(timeout=0.01):
            pass


@contextmanager
def gated(llm: AsyncLLM) -> Iterator[Gate]:
    """The engine waits for leave before every step; at the end it may step freely."""
    engine, gate = llm._engine, Gate()
    step = engine.step

    def waiting_step() -> list[RequestOutput]:
        if engine.unfinished:  # else the last request has just been given up: no step, so none that was allowed
            gate.wait()
        return step()

    with mock.patch.object(engine, "step", waiting_step):
        try:
            yield gate
        finally:
            gate.open = True
