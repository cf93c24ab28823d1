"""What went wrong with an HTTP request, as OpenAI's error object says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "request_too_large",
    "overloaded_error",
    "server_error",
]


@dataclass(slots=True)
class ApiError(Exception):
    """An answer other than success.

    Args:
        status: HTTP status.
        message: one sentence: what was given, what is expected.
        type: the family of the error.
        param: the request's field that is wrong.
        code: a word that programs can test for.
        headers: of the answer, such as ``Retry-After``.
    """

    status: int
    message: str
    type: ErrorType = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request can never be served as it is."""
    return ApiError(400, message, param=param, code=code)


def unknown_model(given: str, served: tuple[str, ...]) -> ApiError:
    """404: a model that is not served here."""
    names = ", ".join(repr(name) for name in served)
    return ApiError(
        404,
        f"the model {given!r} is not served here; expected {names}",
        type="not_found_error",
        param="model",
        code="model_not_found",
    )


def not_found(method: str, path: str) -> ApiError:
    """404: no endpoint has this path."""
    return ApiError(
        404,
        f"there is no {method} {path} here; expected an endpoint, such as /v1/models",
        type="not_found_error",
        code="not_found",
    )


def overloaded(retry_after_s: int) -> ApiError:
    """503: the queue is full."""
    return ApiError(
        503,
        f"the server's queue is full; expected a retry in {retry_after_s} s",
        type="overloaded_error",
        code="overloaded",
        headers={"Retry-After": str(retry_after_s)},
    )


def shutting_down() -> ApiError:
    """503: the server finishes what it has and takes nothing new."""
    return ApiError(
        503,
        "the server is shutting down; expected the request at another one, or after a restart",
        type="overloaded_error",
        code="shutting_down",
        headers={"Retry-After": "5", "Connection": "close"},
    )


def engine_stopped(why: str) -> ApiError:
    """503: no request can be served before the server is started again."""
    return ApiError(503, why, type="server_error", code="engine_stopped")
