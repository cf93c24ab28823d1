"""What comes in over HTTP and how it is answered, counted by endpoint; labels come from bounded sets only."""

from __future__ import annotations

from collections import Counter

from starlette.types import Scope

from dynaspec.observe.family import Family, NumberFamily, counter, gauge

from .admission import Admission

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
ADMISSION_FAMILIES: tuple[Family[Admission], ...] = (
    counter("http_requests_rejected_total", "Requests refused because the queue was full.", lambda a: a.rejected),
    gauge("num_requests_admitted", "Continuations let in that have not ended, running or waiting.", lambda a: a.active),
)
