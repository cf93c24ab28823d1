"""What all requests and answers share, and the error object with its statuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _integrals(values: object) -> object:
    if isinstance(values, list) and float in set(map(type, values)):
        return [_integral(value) for value in values]
    return values


Whole = BeforeValidator(_integral)
"""Marks an integer. JSON knows one kind of number: 3.0 is an integer too."""
Natural = Annotated[int, Field(ge=0, lt=2**31), Whole]
Positive = Annotated[int, Field(ge=1, lt=2**31), Whole]
Integers = BeforeValidator(_integrals)
"""Marks a list of integers in which 3.0 counts as one; quick where there is none."""
TEXT, LIST, OBJECT = "<text>", "<list>", "<object>"
"""Tags of the branches of a union; the brackets tell ``validation`` that they are no fields."""


class RequestModel(BaseModel):
    """Part of a request's body: JSON's types as they are. Unknown fields are kept apart (``unknown_fields``)."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    def unknown_fields(self, path: str = "") -> Iterator[str]:
        """Paths to fields that there are not here, such as ``stream_options.frob``."""
        for name in self.model_extra or ():
            yield path + name.encode("ascii", "backslashreplace").decode()
        for name in self.model_fields_set:
            value = getattr(self, name, None)
            if isinstance(value, RequestModel):
                yield from value.unknown_fields(f"{path}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], RequestModel):
                for i, part in enumerate(value):
                    yield from part.unknown_fields(f"{path}{name}.{i}.")


class AddressedRequest(RequestModel):
    """A body that may say which model it is for."""

    model: str | None = Field(None, max_length=4096, description="A served model's name; null = the one there is.")


class ReplyModel(BaseModel):
    """Part of an answer."""

    model_config = ConfigDict(protected_namespaces=())


def extra(description: str) -> Any:
    """A field of an answer that is left out where there is nothing to say."""
    return Field(None, description=description, exclude_if=_is_none)


def json_kind(value: object) -> str:
    """Chooses the branch of a union by the kind of JSON value, so that only that branch's errors are told."""
    if isinstance(value, list):
        return LIST
    return OBJECT if isinstance(value, dict | BaseModel) else TEXT


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Marks a field of OpenAI's or vLLM's that may only say what happens anyway.

    Args:
        why: the sentence that answers a caller who asks for more.
    """

    why: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "description": f"Only to be compatible: {self.why}."}

    def _check(self, value: object, inner: Callable[[object], object]) -> object:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("unsupported", "{why}", {"why": self.why}) from None


def _is_none(value: object) -> bool:
    return value is None


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
