"""Drives an ASGI application message by message, so that a test decides what arrives when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope


@dataclass
class Reply:
    """What an application has answered."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return json.loads(self.body)["error"]


async def exchange(
    app: ASGIApp,
    method: str = "GET",
    path: str = "/",
    *,
    headers: Mapping[str, str] | None = None,
    body: Iterable[bytes] = (),
    ends: bool = True,
    leaves: bool = False,
    root_path: str = "",
) -> Reply:
    """One request and its answer.

    Args:
        body: in the pieces that it arrives in; without a content-length header it is chunked.
        ends: whether the body's end arrives.
        leaves: whether the client leaves after what has arrived.
    """
    given = {name.lower(): value for name, value in (headers or {}).items()}
    pieces = list(body)
    if pieces and "content-length" not in given:
        given["transfer-encoding"] = "chunked"
    return await _drive(app, _scope(method, path, given, root_path), _messages(pieces, ends, leaves))


def _scope(method: str, path: str, headers: Mapping[str, str], root_path: str) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": root_path,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }


def _messages(pieces: list[bytes], ends: bool, leaves: bool) -> list[Message]:
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if ends:
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    if leaves:
        messages.append({"type": "http.disconnect"})
    return messages


async def _drive(app: ASGIApp, scope: Scope, messages: list[Message]) -> Reply:
    reply = Reply()
    left = iter(messages)

    async def receive() -> Message:
        message = next(left, None)
        if message is None:
            await asyncio.Event().wait()  # nothing more ever comes
        return message

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")
            reply.complete = not message.get("more_body", False)

    await app(scope, receive, send)
    return reply
