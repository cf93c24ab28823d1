from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from dynaspec.server.errors import ApiError
from dynaspec.server.protocol.chat import CalledTool, ChatRequest
from dynaspec.server.tools import ToolParser, ToolUse, tool_use

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "$defs": {"City": {"type": "string"}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def use(**fields: Any) -> ToolUse:
    return tool_use(ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields}))


def parse(pieces: Sequence[str], mode: Any = "auto", name: str = "") -> tuple[str, list[CalledTool]]:
    """(content, calls) of a text that comes in pieces."""
    parser = ToolParser(ToolUse((), mode, name))
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(part.content for part in parts), [one for part in parts for one in part.calls]


def names(calls: Sequence[CalledTool]) -> list[tuple[str, str]]:
    return [(one.function.name, one.function.arguments) for one in calls]


NAMELESS = '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'
NO_JSON = '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>'
TEXTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("plain text", "plain text", []),
    ("trailing \n", "trailing \n", []),
    (call("weather", city="Oslo"), "", [("weather", '{"city": "Oslo"}')]),
    (f"Let me see.\n{call('time')}\n", "Let me see.", [("time", "{}")]),
    (f"{call('time')}\n{call('weather', city='Ålesund')}", "", [("time", "{}"), ("weather", '{"city": "Ålesund"}')]),
    (f"{call('time')} and then", " and then", [("time", "{}")]),
    ("a <tool_ and <tool_call", "a <tool_ and <tool_call", []),
    ("<tool_call>{not json}</tool_call> b", "<tool_call>{not json}</tool_call> b", []),
    ('<tool_call>{"name": "x"}</tool_call>', '<tool_call>{"name": "x"}</tool_call>', []),
    (NAMELESS, NAMELESS, []),
    (NO_JSON, NO_JSON, []),
    ('<tool_call>{"name": "time", "arguments": {}}', '<tool_call>{"name": "time", "arguments": {}}', []),
    ('<tool_call>{"name": "x", "parameters": {"a": 1}}</tool_call>', "", [("x", '{"a": 1}')]),
    ('<tool_call>{"name": "x", "arguments": {"a": "\\ud800"}}</tool_call>', "", [("x", '{"a": "\\ud800"}')]),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("text", "content", "calls"), TEXTS)
def test_calls_are_found_however_the_text_is_cut(
    text: str, content: str, calls: list[tuple[str, str]], size: int
) -> None:
    found_content, found = parse([text[i : i + size] for i in range(0, len(text), size)])
    assert (found_content, names(found)) == (content, calls)
    assert [one.index for one in found] == list(range(len(found)))
    assert len({one.id for one in found}) == len(found)


def test_text_goes_out_as_soon_as_it_can_be_no_call() -> None:
    parser = ToolParser(ToolUse((), "auto"))
    assert parser.feed("one two").content == "one two"
    assert parser.feed(" <tool").content == ""
    assert parser.feed("box").content == " <toolbox"


def test_a_call_goes_out_as_a_whole() -> None:
    parser = ToolParser(ToolUse((), "auto"))
    *begun, last = call("time")
    assert all(not parser.feed(piece).calls for piece in begun)
    [one] = parser.feed(last).calls
    assert one.function.name == "time"


def test_without_tools_text_is_text() -> None:
    assert parse([call("time"), " "], "none") == (call("time") + " ", [])


def test_demanded_calls() -> None:
    content, calls = parse(['{"city": ', '"Oslo"}'], "named", "weather")
    assert (content, names(calls)) == ("", [("weather", '{"city": "Oslo"}')])
    text = json.dumps([{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}])
    content, calls = parse([text[:9], text[9:]], "required")
    assert (content, names(calls)) == ("", [("a", "{}"), ("b", '{"x": 1}')])


@pytest.mark.parametrize("mode", ["named", "required"])
def test_demanded_calls_that_were_cut_short_are_text(mode: str) -> None:
    assert parse(['[{"name": "a", "argum'], mode, "a") == ('[{"name": "a", "argum', [])


def test_choices() -> None:
    assert use() == use(tool_choice="none", tools=[TIME]) == use(tool_choice="auto") == ToolUse()
    assert use(tools=[TIME]).mode == "auto"
    assert use(tools=[TIME]).form() is None
    assert use(tools=[TIME, WEATHER], tool_choice="required").mode == "required"
    named = use(tools=[TIME, WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert (named.mode, named.name) == ("named", "weather")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": [TIME, TIME]}, "tools"),
    ],
)
def test_choices_that_cannot_be(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError, match="expected") as raised:
        use(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


def schema_of(one: ToolUse) -> dict[str, Any]:
    form = one.form()
    assert form is not None
    assert isinstance(form.json, str)
    schema: dict[str, Any] = json.loads(form.json)
    return schema


def test_the_schema_of_a_named_call_is_its_parameters() -> None:
    named = use(tools=[TIME, WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert schema_of(named) == WEATHER["function"]["parameters"]  # type: ignore[index]
    named = use(tools=[TIME], tool_choice={"type": "function", "function": {"name": "time"}})
    assert schema_of(named) == {"type": "object", "properties": {}, "additionalProperties": False}


def test_the_schema_of_required_calls() -> None:
    schema = schema_of(use(tools=[TIME, WEATHER], tool_choice="required"))
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert "maxItems" not in schema
    assert schema["$defs"] == {"City": {"type": "string"}}
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["name"] == {"const": "time"}
    assert second["properties"]["arguments"]["properties"] == {"city": {"$ref": "#/$defs/City"}}
    assert "$defs" not in second["properties"]["arguments"]
    one = schema_of(use(tools=[TIME], tool_choice="required", parallel_tool_calls=False))
    assert one["maxItems"] == 1


def test_definitions_that_contradict_each_other() -> None:
    other = json.loads(json.dumps(WEATHER).replace('"weather"', '"climate"').replace('"string"', '"integer"'))
    with pytest.raises(ApiError, match="define 'City' differently"):
        use(tools=[WEATHER, other], tool_choice="required").form()
