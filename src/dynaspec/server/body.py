"""How large a request's body may be, and how long it may take to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .asgi import answer, header
from .errors import ApiError


class BoundedBody:
    """Reads a body before the app sees the request, and refuses what is too large (413) or too slow (408).

    Args:
        app: who gets the requests whose body is there.
        limit: bytes.
        timeout_s: seconds from the headers to the body's last byte.
        seen: called with each body, if anyone wants to see them.
    """

    def __init__(
        self, app: ASGIApp, limit: int, timeout_s: float, seen: Callable[[Scope, bytes], None] | None = None
    ) -> None:
        self._app = app
        self._limit = limit
        self._timeout_s = timeout_s
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await answer(error, scope, receive, send)
        except ClientDisconnect:
            pass  # nobody is left to answer
        else:
            if self._seen is not None:
                self._seen(scope, body)
            await self._app(scope, _after(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """
        Raises:
            ApiError: too large, or too slow.
            ClientDisconnect: the client has left.
        """
        if int(header(scope, "content-length") or 0) > self._limit:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._collect(receive)
        except TimeoutError:
            raise ApiError(
                408,
                f"the request's body did not arrive; expected all of it within {self._timeout_s:g} s",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None

    async def _collect(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self._limit:  # in chunks of any number, nothing says beforehand how large it will be
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the request's body is too large; expected at most {self._limit} bytes",
            type="request_too_large",
            code="request_too_large",
        )


def _has_body(scope: Scope) -> bool:
    return header(scope, "transfer-encoding") is not None or (header(scope, "content-length") or "0") != "0"


def _after(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, then whatever else comes: the client's leaving."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
