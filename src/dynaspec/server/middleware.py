"""What stands before the endpoints: paths, keys, bodies, what every answer gets, and counts, as pure ASGI;
and admission, which only requests that generate have to pass.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import re
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynaspec.observe.families import Family, NumberFamily, counter, gauge

from .errors import ApiError, bad_request, not_found, overloaded, shutting_down
from .logs import FIELDS, describe


def header(scope: Scope, name: str) -> str | None:
    """A header of the request; None if it is not there."""
    return Headers(scope=scope).get(name)


def route_path(scope: Scope) -> str:
    """The path as the endpoints are written, whether or not a proxy in front has cut off the root path."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    inside = bool(root) and (path == root or path.startswith(root + "/"))
    return path[len(root) :] if inside else path


class BelowRootPath:
    """Tells the application under which path a proxy offers it.

    uvicorn could say so too, but it takes it for granted that the proxy has cut the path off.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._root_path}, receive, send)


class ExactPaths:
    """Answers 404 to a path that ends with a line feed, which the router would take for the path without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("\n"):
            await answer(not_found(scope["method"], repr(scope["path"])), scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request that the app never sees."""
    await as_response(error)(scope, receive, send)


def as_response(error: ApiError) -> JSONResponse:
    """OpenAI's error object, with status and headers."""
    return JSONResponse(error.body(), error.status, error.headers)


_OPEN = frozenset({"/health", "/ready", "/ping", "/version", "/metrics", "/openapi.json", "/", "/dashboard"})
"""Paths that need no key: what supervisors and Prometheus ask for, and pages without any data. Every other does, known
or not."""
_OPEN_FOLDER = "/dashboard/static/"


class ApiKeys:
    """Answers requests without a valid key with 401, before their body is read.

    Args:
        keys: any of them is valid.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[SecretStr]) -> None:
        self._app = app
        self._digests = [_digest(key.get_secret_value()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(route_path(scope)):
            await self._app(scope, receive, send)
            return
        kind, _, key = (header(scope, "authorization") or "").partition(" ")
        if kind.lower() == "bearer" and self._knows(key.strip()):
            await self._app(scope, receive, send)
        else:
            await answer(_unauthorized(), scope, receive, send)

    def _knows(self, key: str) -> bool:
        """Takes equally long whichever key it is, and however much of one is right."""
        given, found = _digest(key), False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found


def _is_open(path: str) -> bool:
    return path in _OPEN or path.startswith(_OPEN_FOLDER)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "the request has no valid API key; expected the header 'Authorization: Bearer KEY'",
        type="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


class BoundedBody:
    """Reads a body before the app sees the request, and refuses what is too large (413) or too slow (408).

    Args:
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


UNKNOWN_PATH = "other"
"""Stands for all paths that there is no endpoint for."""
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})


class HttpMetrics:
    """Counts of one server; belongs to its event loop."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests: Counter[tuple[str, str, str]] = Counter()
        """Ended exchanges by method, path as its endpoint is written, and status."""

    def answered(self, scope: Scope, status: int) -> None:
        """An exchange has ended. The router leaves the endpoint in the scope, if there is one."""
        method, path = scope["method"], getattr(scope.get("route"), "path", UNKNOWN_PATH)
        self.requests[method if method in _METHODS else "other", path, str(status)] += 1


HTTP_FAMILIES: tuple[Family[HttpMetrics], ...] = (
    NumberFamily(
        "http_requests_total",
        "counter",
        "Answered HTTP requests; 499: the client left before the answer began.",
        ("method", "path", "status"),
        lambda metrics: [*metrics.requests.items()],
    ),
    gauge("http_requests_in_flight", "HTTP requests being answered, streams included.", lambda m: m.in_flight),
)

REQUEST_ID = "X-Request-Id"
CLIENT_LEFT = 499
"""Logged as the status where the client left before the answer began; nginx's word."""

_access = logging.getLogger("dynaspec.server.access")
_errors = logging.getLogger(__name__)
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PROBES = frozenset({"/health", "/ready", "/ping", "/metrics"})
"""Asked all the time; their success is logged as DEBUG only."""
_SAFE = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}


@dataclass(slots=True)
class _Answer:
    """What has been sent."""

    status: int = CLIENT_LEFT
    begun: bool = False
    complete: bool = False
    started_at: float = field(default_factory=time.perf_counter)


class Exchanges:
    """Stands before everything else.

    ``request.state`` gets ``request_id``. An endpoint may put ``usage`` there, with ``prompt_tokens`` and
    ``completion_tokens``, for the log, and ``answer_headers``, for the answer.

    Args:
        metrics: where exchanges are counted.
        access_log: log a line for each request.
        quote: whether the log may quote what callers have sent.
    """

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics, access_log: bool, quote: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log
        self._quote = quote

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(header(scope, REQUEST_ID))
        scope.setdefault("state", {})["request_id"] = request_id
        sent = _Answer()
        reply = _watched(send, sent, request_id, scope["state"])
        self._metrics.in_flight += 1
        try:
            await self._app(scope, receive, reply)
        except Exception as error:
            _errors.error("a request has failed\n%s", describe(error, message=self._quote), extra=_id_only(request_id))
            if not sent.begun:
                await answer(_internal(request_id), scope, receive, reply)
            # Else uvicorn closes the connection, so that nobody takes half an answer for a whole one.
        finally:
            self._metrics.in_flight -= 1
            self._metrics.answered(scope, sent.status)
            if self._access_log:
                _log(scope, sent)


def _watched(send: Send, sent: _Answer, request_id: str, state: Mapping[str, Any]) -> Callable[[Message], Any]:
    async def reply(message: Message) -> None:
        if message["type"] == "http.response.start":
            sent.status, sent.begun = message["status"], True
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID] = request_id
            headers.update(state.get("answer_headers", {}))
            for name, value in _SAFE.items():
                headers.setdefault(name, value)
        elif message["type"] == "http.response.body":
            sent.complete = not message.get("more_body", False)
        await send(message)

    return reply


def _log(scope: Scope, sent: _Answer) -> None:
    fields: dict[str, Any] = {
        "request_id": scope["state"]["request_id"],
        "method": scope["method"],
        "path": scope.get("raw_path", scope["path"].encode()).decode("ascii", "backslashreplace"),
        "status": sent.status,
        "seconds": round(time.perf_counter() - sent.started_at, 4),
    }
    usage = scope["state"].get("usage")
    if usage is not None:
        fields |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    if not sent.complete:
        fields["complete"] = False
    routine = sent.status == 200 and route_path(scope) in _PROBES
    _access.log(logging.DEBUG if routine else logging.INFO, "request", extra={FIELDS: fields})


def _request_id(given: str | None) -> str:
    return given if given is not None and _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _id_only(request_id: str) -> dict[str, dict[str, str]]:
    return {FIELDS: {"request_id": request_id}}


def _internal(request_id: str) -> ApiError:
    return ApiError(
        500,
        f"the server failed to answer request {request_id}; its log says why",
        type="server_error",
        code="internal_error",
    )


_REMEMBERED = 256
"""Completions that the rate is estimated from."""
_HORIZON_S = 60.0
"""Older completions say nothing of the present rate."""
_RETRY_AFTER_S = (1, 60)
_UNKNOWN_S = 5
"""What a refused caller is told to wait where nothing has been completed of late."""


class Admission:
    """Counts the continuations in the server, and refuses more than it can run or queue.

    Not thread-safe: it belongs to the event loop.

    Args:
        running: continuations that the engine runs at once.
        queued: continuations that may wait for them.
        clock: monotonic seconds.
    """

    def __init__(self, running: int, queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = running + queued
        self._clock = clock
        self.active = 0
        """Continuations that have been admitted and have not ended."""
        self.rejected = 0
        """Requests refused because the server was full."""
        self.draining = False
        """No more requests are taken."""
        self._completed: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        """When, and how many continuations."""

    @asynccontextmanager
    async def slot(self, weight: int = 1) -> AsyncIterator[None]:
        """Room for a request, from its arrival to the end of its answer.

        Args:
            weight: continuations it asks for: prompts times ``n``.

        Raises:
            ApiError: 503, full or shutting down; 400, more than the server ever takes.
        """
        self._admit(weight)
        try:
            yield
        finally:
            self.active -= weight
            self._completed.append((self._clock(), weight))

    def drain(self) -> None:
        """Refuses all requests from now on."""
        self.draining = True

    def _admit(self, weight: int) -> None:
        if self.draining:
            raise shutting_down()
        if weight > self._limit:
            raise bad_request(
                f"the request asks for {weight} continuations (prompts times n), but the server takes {self._limit} "
                "at once; expected fewer"
            )
        excess = self.active + weight - self._limit
        if excess > 0:
            self.rejected += 1
            raise overloaded(self._retry_after(excess))
        self.active += weight

    def _retry_after(self, excess: int) -> int:
        """Seconds until ``excess`` more continuations will have ended, at the rate of late."""
        now = self._clock()
        recent = [(at, weight) for at, weight in self._completed if now - at <= _HORIZON_S]
        if not recent:
            return _UNKNOWN_S
        per_second = sum(weight for _, weight in recent) / max(now - recent[0][0], 1.0)
        low, high = _RETRY_AFTER_S
        return min(max(math.ceil(excess / per_second), low), high)


ADMISSION_FAMILIES: tuple[Family[Admission], ...] = (
    counter("http_requests_rejected_total", "Requests refused because the queue was full.", lambda a: a.rejected),
    gauge("num_requests_admitted", "Continuations let in that have not ended, running or waiting.", lambda a: a.active),
)
