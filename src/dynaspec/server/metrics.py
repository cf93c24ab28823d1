"""What comes in over HTTP and how it is answered, counted by endpoint; labels come from bounded sets only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynaspec.observe.family import Family, NumberFamily, counter, gauge

from .admission import Admission
from .middleware import CLIENT_LEFT

UNKNOWN_PATH = "other"
"""Stands for all paths that there is no endpoint for."""
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})


class HttpMetrics:
    """Counts of one server; belongs to its event loop."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._answered: Counter[tuple[str, str, str]] = Counter()

    def answered(self, method: str, path: str, status: int) -> None:
        """An exchange has ended.

        Args:
            path: an endpoint's template, or ``UNKNOWN_PATH``.
        """
        self._answered[method if method in _METHODS else "other", path, str(status)] += 1

    @property
    def requests(self) -> Mapping[tuple[str, str, str], int]:
        """Ended exchanges by method, path template and status."""
        return self._answered


class CountedExchanges:
    """Stands before everything that answers.

    Args:
        app: who answers.
        metrics: where it is counted.
    """

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.in_flight += 1
        try:
            await self._app(scope, receive, reply)
        finally:
            self._metrics.in_flight -= 1
            self._metrics.answered(scope["method"], _template(scope), status)


def _template(scope: Scope) -> str:
    """The path as its endpoint is written; the router leaves the endpoint in the scope, if there is one."""
    path: str = getattr(scope.get("route"), "path", UNKNOWN_PATH)
    return path


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
ADMISSION_FAMILIES: tuple[Family[Admission], ...] = (
    counter("http_requests_rejected_total", "Requests refused because the queue was full.", lambda a: a.rejected),
    gauge("num_requests_admitted", "Continuations let in that have not ended, running or waiting.", lambda a: a.active),
)
