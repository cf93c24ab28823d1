"""The error object, and the statuses that come with it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from .base import ReplyModel


class ErrorBody(ReplyModel):
    """What went wrong."""

    message: str = Field(description="One sentence: what was given, what is expected.")
    type: str = Field(description="The family of the error.")
    param: str | None = Field(description="The request's field that is wrong.")
    code: str | None = Field(description="A word that programs can test for.")


class ErrorReply(ReplyModel):
    """Any answer other than success."""

    error: ErrorBody


def errors(**when: str) -> dict[int | str, dict[str, Any]]:
    """Statuses for an endpoint's documentation, such as ``_404="no such model"``."""
    return {int(status[1:]): {"model": ErrorReply, "description": what} for status, what in when.items()}


REQUEST_ERRORS = errors(
    _400="The request can never be served as it is.",
    _401="No valid API key.",
    _404="The model is not served here.",
    _408="The body did not arrive in time.",
    _413="The body is too large.",
    _503="The server is full, shutting down, or its engine has stopped.",
)
"""Of every endpoint that takes a body."""
GENERATION_ERRORS = REQUEST_ERRORS | errors(_504="The answer took longer than the server allows.")
"""Of endpoints that generate."""

EVENTS: dict[str, Any] = {
    "description": "The answer; with `stream` as server-sent events, each a chunk as JSON, and `[DONE]` at the end.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
"""A success that may be a stream."""
