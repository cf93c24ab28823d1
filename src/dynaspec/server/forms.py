"""The form of output that a request asks for, out of the several ways to ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaspec.contract.errors import RequestError
from dynaspec.contract.sampling_params import StructuredOutputsParams

from .errors import bad_request
from .protocol.generation import FormFields
from .protocol.structured import JsonObjectFormat, JsonSchemaFormat, StructuredOutputs

_GUIDED = ("json", "regex", "choice", "grammar")


def form_of(body: FormFields) -> StructuredOutputsParams | None:
    """
    Returns:
        None for free text.

    Raises:
        ApiError: two forms, or one that cannot be.
    """
    asked = _asked(body)
    if len(asked) > 1:
        first, second = sorted(asked)[:2]
        raise bad_request(f"both {first} and {second} are given; expected one form of output", param=second)
    if body.guided_whitespace_pattern is not None and "guided_json" not in asked:
        raise bad_request(
            "guided_whitespace_pattern is given without guided_json; expected both or neither",
            param="guided_whitespace_pattern",
        )
    return next((form(options, param=name) for name, options in asked.items()), None)


def form(options: Mapping[str, Any], *, param: str) -> StructuredOutputsParams:
    """
    Args:
        options: fields of ``StructuredOutputsParams``.
        param: the request's field that they come from.

    Raises:
        ApiError: no such form.
    """
    try:
        return StructuredOutputsParams(**options)
    except RequestError as error:
        raise bad_request(str(error), param=param) from None


def _asked(body: FormFields) -> dict[str, Mapping[str, Any]]:
    """Field of the request → options of the form that it asks for."""
    asked: dict[str, Mapping[str, Any]] = {}
    if isinstance(body.response_format, JsonObjectFormat):
        asked["response_format"] = {"json_object": True}
    elif isinstance(body.response_format, JsonSchemaFormat):
        asked["response_format"] = {"json": body.response_format.json_schema.schema_}
    if body.structured_outputs is not None:
        asked["structured_outputs"] = _options(body.structured_outputs)
    for kind in _GUIDED:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            asked[f"guided_{kind}"] = {kind: value}
    if body.guided_whitespace_pattern is not None and "guided_json" in asked:
        asked["guided_json"] = {**asked["guided_json"], "whitespace_pattern": body.guided_whitespace_pattern}
    return asked


def _options(given: StructuredOutputs) -> dict[str, Any]:
    return {
        "json": given.json_,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "json_object": given.json_object,
        "whitespace_pattern": given.whitespace_pattern,
        "disable_any_whitespace": given.disable_any_whitespace,
    }
