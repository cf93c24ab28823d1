"""What every answer gets: a request id, safe headers, a line in the log, and an error object if the app fails."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .asgi import answer, header, route_path
from .errors import ApiError
from .logs import FIELDS, describe

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

    status: int | None = None
    complete: bool = False
    started_at: float = field(default_factory=time.perf_counter)


class Exchanges:
    """Stands before everything else.

    ``request.state`` gets ``request_id``. An endpoint may put ``usage`` there, with ``prompt_tokens`` and
    ``completion_tokens``, for the log, and ``answer_headers``, for the answer.

    Args:
        app: who answers.
        access_log: log a line for each request.
        quote: whether the log may quote what callers have sent.
    """

    def __init__(self, app: ASGIApp, *, access_log: bool, quote: bool) -> None:
        self._app = app
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
        try:
            await self._app(scope, receive, reply)
        except Exception as error:
            _errors.error("a request has failed\n%s", describe(error, message=self._quote), extra=_id_only(request_id))
            if sent.status is None:
                await answer(_internal(request_id), scope, receive, reply)
            # Else uvicorn closes the connection, so that nobody takes half an answer for a whole one.
        finally:
            if self._access_log:
                _log(scope, sent)


def _watched(send: Send, sent: _Answer, request_id: str, state: Mapping[str, Any]) -> Callable[[Message], Any]:
    async def reply(message: Message) -> None:
        if message["type"] == "http.response.start":
            sent.status = message["status"]
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
        "status": CLIENT_LEFT if sent.status is None else sent.status,
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
