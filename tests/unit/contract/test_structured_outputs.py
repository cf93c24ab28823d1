from __future__ import annotations

import json
from typing import Any

import pytest

from dynaspec.contract.errors import RequestError
from dynaspec.contract.sampling_params import SamplingParams, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "given",
    [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        {"json": {}},
        {"json": "true"},
        {"json": SCHEMA, "whitespace_pattern": " ?"},
        {"json_object": True, "disable_any_whitespace": True},
        {"regex": "a+", "json_object": False},
        {"choice": ["a"]},
        {"choice": ("a", "b", "é")},
        {"grammar": 'start: "a"'},
    ],
    ids=str,
)
def test_one_form_is_enough(given: dict[str, Any]) -> None:
    form = StructuredOutputsParams(**given)
    assert SamplingParams(structured_outputs=form).structured_outputs is form
    assert hash(form) == hash(StructuredOutputsParams(**given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "has nothing; expected exactly one of json, regex, choice, grammar, json_object"),
        ({"json_object": False}, "has nothing"),
        ({"json": SCHEMA, "regex": "a"}, "has json and regex; expected exactly one"),
        ({"regex": ""}, "regex holds ''; expected non-empty text"),
        ({"regex": 5}, "regex holds 5; expected non-empty text"),
        ({"regex": "\ud800"}, "regex is not valid Unicode at character 0"),
        ({"grammar": b"x"}, "grammar holds b'x'"),
        ({"json": ""}, "json holds ''"),
        ({"json": "{"}, "json is not JSON: "),
        ({"json": "[1]"}, r"json is '\[1\]'; expected a JSON schema"),
        ({"json": [1]}, r"json is \[1\]; expected a JSON schema"),
        ({"json": True}, "json is True; expected a JSON schema"),
        ({"json": {"a": {1}}}, "json holds what JSON cannot"),
        ({"json": {"a": float("nan")}}, "json holds what JSON cannot"),
        ({"json": "[" * 100_000}, "json is nested too deeply"),
        ({"choice": []}, r"choice is \[\]; expected a list of strings"),
        ({"choice": "ab"}, "choice is 'ab'; expected a list of strings"),
        ({"choice": ["a", None]}, "choice holds None; expected non-empty text"),
        ({"choice": [""]}, "choice holds ''"),
        ({"choice": 5 * ["x" * 200 + "\ud800"]}, "choice is not valid Unicode at character 200"),
        ({"json_object": "yes"}, "json_object is 'yes'; expected True or False"),
        ({"json_object": True, "disable_any_whitespace": None}, "disable_any_whitespace is None"),
        ({"regex": "a", "whitespace_pattern": " "}, "without JSON; expected them with json or json_object only"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "expected at most one of them"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        StructuredOutputsParams(**given)
    assert "\n" not in str(caught.value)


def test_a_schema_of_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = loop
    with pytest.raises(RequestError, match="what JSON cannot"):
        StructuredOutputsParams(json=loop)


def test_later_changes_by_the_caller_do_not_reach_it() -> None:
    schema, choices = {"type": "object"}, ["a"]
    form, other = StructuredOutputsParams(json=schema), StructuredOutputsParams(choice=choices)
    schema["type"] = "array"
    choices.append("b")
    assert form.json == '{"type": "object"}'
    assert other.choice == ("a",)


def test_parameters_take_nothing_else_for_a_form() -> None:
    with pytest.raises(RequestError, match="structured_outputs is a dict; expected StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
