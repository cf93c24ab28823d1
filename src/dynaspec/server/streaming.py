"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError
from .generation import ClientGone, Generation, unless_gone
from .replies import Replies

_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events as they come, until they or the client have ended.

    Args:
        events: each with its ``data:`` and empty line.
        close: called in any case, at the end.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGone:
            pass  # nobody is left to be told
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def events(generation: Generation, replies: Replies) -> AsyncIterator[bytes]:
    """A generation's events. An error that comes in the middle is the last event but one.

    Raises:
        Exception: what nobody expected, after an event that says so.
    """
    try:
        for chunk in replies.opening():
            yield _event(chunk)
        async for prompt, output in generation.outputs():
            for chunk in replies.chunks(prompt, output):
                yield _event(chunk)
        for chunk in replies.closing():
            yield _event(chunk)
    except ApiError as error:
        yield _error_event(error)
    except Exception:
        yield _error_event(ApiError(500, "the server failed; its log says why", "server_error", code="internal_error"))
        raise
    yield _DONE


def _event(chunk: BaseModel) -> bytes:
    return b"data: " + chunk.model_dump_json().encode() + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return b"data: " + to_json(error.body()) + b"\n\n"
