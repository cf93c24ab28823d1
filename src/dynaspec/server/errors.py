"""What went wrong with an HTTP request, as OpenAI's error object says it; of a body, in one sentence with the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

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


_KIND_FIELDS = {"role": "role", "response_format": "type"}
"""By type of error (``protocol``), the field that says of which kind an object is."""
_LONGEST_VALUE = 60
"""Characters of a wrong value that the sentence shows."""


def validation_error(error: RequestValidationError, *, body: bytes) -> ApiError:
    """The 400 for a request that does not fit its endpoint's schema; ``param`` is the path to the field.

    Covers what FastAPI raises this for: a body that is missing, not JSON, not declared as JSON, or not an object,
    and fields that are unknown, missing or wrong. Of several faults the first is told.

    Args:
        body: as it came. FastAPI does not tell none from the value null.
    """
    fault = error.errors()[0]
    path = _path(fault["loc"])
    if fault["type"] == "json_invalid":
        at, why = fault["loc"][-1], fault["ctx"]["error"]
        return bad_request(f"the body is not JSON at character {at} ({why}); expected a JSON object")
    if not path:
        return bad_request(_about_the_body(fault, given=bool(body)))
    if fault["type"] == "missing":
        return bad_request(f"the request lacks the field {path!r}; expected it to be given", param=path)
    if fault["type"] == "unsupported":
        return bad_request(f"{path}: {fault['msg']}", param=path, code="unsupported_parameter")
    given, kind = fault.get("input"), _KIND_FIELDS.get(fault["type"])
    if kind is not None and isinstance(given, Mapping) and kind in given:
        path, given = f"{path}.{kind}", given[kind]
    return bad_request(f"{path} is {_shown(given)}; {_expected(fault)}", param=path)


def unreadable_body(error: HTTPException) -> ApiError | None:
    """The 400 for a body that FastAPI could not even parse, which it reports as an ``HTTPException``.

    Returns:
        None if the exception is about something else.
    """
    cause = error.__cause__
    if isinstance(cause, UnicodeDecodeError):
        return bad_request(f"the body is not UTF-8 at byte {cause.start}; expected JSON in UTF-8")
    if isinstance(cause, RecursionError):
        return bad_request("the body is nested too deeply; expected fewer levels")
    if isinstance(cause, ValueError):
        return bad_request("the body holds a number with too many digits; expected a shorter one")
    return None


def _path(location: Sequence[int | str]) -> str:
    """``messages.0.content``: without FastAPI's ``body`` and the names of a union's branches (``protocol.base``)."""
    parts = [str(part) for part in location[1:] if not str(part).startswith(("<", "[", "function-"))]
    return ".".join(parts).encode("ascii", "backslashreplace").decode()


def _about_the_body(fault: Mapping[str, Any], *, given: bool) -> str:
    value = fault.get("input")
    if not given:
        return "the request has no body; expected a JSON object"
    if fault["type"] == "string_unicode":
        return "the name of a field is not valid Unicode; expected it to be left out"
    if isinstance(value, bytes):
        return "the body is not declared as JSON; expected the header 'Content-Type: application/json'"
    return f"the body is {_shown(value)}; expected a JSON object"


def _shown(value: object) -> str:
    """Containers by their kind alone: they may be large, and nested more deeply than ``repr`` can go."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and value.bit_length() > 128:
        return "a very large number"
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


_EXPECTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than_equal": lambda ctx: f"a number of at least {_number(ctx['ge'])}",
    "less_than_equal": lambda ctx: f"a number of at most {_number(ctx['le'])}",
    "greater_than": lambda ctx: f"a number above {_number(ctx['gt'])}",
    "less_than": lambda ctx: f"a number below {_number(ctx['lt'])}",
    "too_long": lambda ctx: f"at most {ctx['max_length']}",
    "too_short": lambda ctx: f"at least {ctx['min_length']}",
    "string_too_long": lambda ctx: f"text of at most {ctx['max_length']} characters",
    "string_too_short": lambda ctx: f"text of at least {ctx['min_length']} characters",
    "string_pattern_mismatch": lambda ctx: f"text that matches {ctx['pattern']}",
    "literal_error": lambda ctx: ctx["expected"],
    "union_tag_invalid": lambda ctx: " or ".join(re.findall(r"<(\w+)>", ctx["expected_tags"])),
    "none_required": lambda ctx: "null",
    "int_type": lambda ctx: "an integer",
    "float_type": lambda ctx: "a number",
    "string_type": lambda ctx: "text",
    "string_unicode": lambda ctx: "text in valid Unicode",
    "bool_type": lambda ctx: "true or false",
    "list_type": lambda ctx: "a list",
    "dict_type": lambda ctx: "an object",
    "model_type": lambda ctx: "an object",
    "model_attributes_type": lambda ctx: "an object",
    "finite_number": lambda ctx: "a finite number",
}
"""By pydantic's type of error, what the rest of the sentence says."""


def _number(limit: float) -> str:
    """In full; integers without a point."""
    return str(int(limit) if float(limit).is_integer() else limit)


def _expected(fault: Mapping[str, Any]) -> str:
    words = _EXPECTED.get(fault["type"])
    if words is not None:
        return f"expected {words(fault.get('ctx', {}))}"
    message = str(fault["msg"])
    return message[:1].lower() + message[1:]
