"""The server's app over an engine, asked without a network."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
from fastapi import FastAPI

from dynaspec import AsyncLLM
from dynaspec.server.app import create_app
from dynaspec.server.config import ServerConfig
from dynaspec.server.middleware import Admission
from dynaspec.server.run import tool_format_of
from dynaspec.server.state import ServerState

MODEL = "tiny"
ADMITTED = 64
"""Continuations that the app takes in at once."""


def make_state(llm: AsyncLLM, **options: Any) -> ServerState:
    """What a server of this model shares; options are those of ``ServerConfig``."""
    config = ServerConfig.build(served_model_name=[MODEL, "other-name"], **options)
    return ServerState(
        llm=llm,
        config=config,
        admission=Admission(ADMITTED, 0),
        served_names=config.served_model_name,
        started_at=7,
        tool_format=tool_format_of(llm, config),
    )


def make_app(llm: AsyncLLM, **options: Any) -> FastAPI:
    return create_app(make_state(llm, **options))


class Client:
    """Sends bodies and reads answers."""

    def __init__(self, app: FastAPI) -> None:
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(path)

    async def send(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        """A body as it is."""
        return await self._http.post(path, content=body, headers={"Content-Type": "application/json", **headers})

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """A body as JSON, half surrogate pairs and all."""
        return await self.send(path, json.dumps(body).encode())

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer to a request that succeeds."""
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream that ends as it should."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_of(response.text)

    async def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of a request that is refused with 400."""
        response = await self.post(path, **body)
        assert response.status_code == 400, response.text
        return error_of(response)

    async def close(self) -> None:
        await self._http.aclose()


def events_of(text: str) -> list[dict[str, Any]]:
    """Parses a stream, which must end with ``[DONE]``."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, which must be complete."""
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "expected" in error["message"]
    return error


def texts_of(chunks: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Each choice's text, put together from a stream's chunks."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    return texts
