"""A small server that speaks OpenAI's protocol as it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = Callable[["Call"], Awaitable[web.StreamResponse]]
MODEL = {"id": "fake", "object": "model", "owned_by": "somebody", "max_model_len": 64, "root": "folder/fake"}


@dataclass
class Call:
    """A request for text, as it came."""

    request: web.Request
    body: dict[str, Any]

    async def stream(self, events: Sequence[object], **headers: str) -> web.StreamResponse:
        """Events as JSON, or as they are if they are bytes."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(self.request)
        for event in events:
            await response.write(event if isinstance(event, bytes) else as_event(event))
        return response


@dataclass
class FakeServer:
    """What it serves can be changed at any time."""

    models: list[Mapping[str, Any]] | None = field(default_factory=lambda: [MODEL])
    answer: Answer = field(default_factory=lambda: words("one", "two", "three"))
    metrics: list[str] = field(default_factory=list)
    """Pages of ``/metrics``, one a question; the last one again and again."""
    tokenizes: bool = True
    key: str | None = None
    """What callers must send; None = nothing."""
    calls: list[Call] = field(default_factory=list)
    questions: list[tuple[str, Any]] = field(default_factory=list)
    """(path, body) of everything else."""
    most_at_once: int = 0
    _at_once: int = 0
    _words: dict[str, int] = field(default_factory=dict)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._check_key])
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/metrics", self._metrics)
        return app

    def encode(self, text: str) -> list[int]:
        """A token a word."""
        return [self._words.setdefault(word, len(self._words)) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        spelled = {token: word for word, token in self._words.items()}
        return " ".join(spelled[token] for token in tokens)

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key", "type": "authentication_error"}}, status=401)
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        call = Call(request, await request.json())
        self.calls.append(call)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self.answer(call)
        finally:
            self._at_once -= 1

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self.questions.append((request.path, None))
        if self.models is None:
            return web.Response(status=404)
        return web.json_response({"object": "list", "data": self.models})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.questions.append((request.path, body))
        if not self.tokenizes:
            return web.json_response({"detail": "Not Found"}, status=404)
        tokens = self.encode(body["prompt"])
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 64})

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.questions.append((request.path, body))
        return web.json_response({"prompt": self.decode(body["tokens"])})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self.questions.append((request.path, None))
        if not self.metrics:
            return web.Response(status=404)
        page = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
        return web.Response(text=page)


def running(fake: FakeServer) -> TestServer:
    """The server on a free port of the loopback; a context manager."""
    return TestServer(fake.app())


def root(server: TestServer) -> str:
    return str(server.make_url("")).rstrip("/")


def as_event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def token(text: str, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    """An event of a completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None, **more}


def delta(finish_reason: str | None = None, **said: Any) -> dict[str, Any]:
    """An event of a chat."""
    return {"choices": [{"index": 0, "delta": said, "finish_reason": finish_reason}]}


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """The last event of a stream."""
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def words(*texts: str, tokens: int | None = None, speculation: Mapping[str, Any] | None = None) -> Answer:
    """A complete answer: a text an event, then usage; a token a text unless told otherwise."""

    async def answer(call: Call) -> web.StreamResponse:
        *first, last = texts
        end = usage(7, tokens or len(texts), cached=2)
        choice = token(last, "length")
        if speculation is not None:
            choice["choices"][0]["speculation"] = speculation
        return await call.stream([*(token(text) for text in first), choice, end, DONE])

    return answer


def refused(status: int, message: str, kind: str = "invalid_request_error") -> Answer:
    async def answer(call: Call) -> web.StreamResponse:
        return web.json_response({"error": {"message": message, "type": kind, "code": None}}, status=status)

    return answer


async def broken(call: Call) -> web.StreamResponse:
    """A stream whose connection is cut after a token."""
    response = await call.stream([token("one")])
    transport = call.request.transport
    if transport is not None:
        transport.abort()
    await asyncio.sleep(0)
    return response
