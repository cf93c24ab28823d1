from __future__ import annotations

from typing import Any

import pytest

from dynaspec.engine.chat_prompt import WORDINGS, ToolFormat
from dynaspec.server.tools import READERS, ToolParser, ToolUse

Found = list[tuple[str, str]]


def parse(tool_format: ToolFormat, text: str, size: int) -> tuple[str, Found]:
    """(content, calls) of a text that comes in pieces."""
    parser = ToolParser(ToolUse((), "auto", tool_format=tool_format))
    parts = [parser.feed(text[i : i + size]) for i in range(0, len(text), size)] + [parser.finish()]
    calls = [one.function for part in parts for one in part.calls]
    return "".join(part.content for part in parts), [(one.name, one.arguments) for one in calls]


A, B = ("a", '{"x": 1}'), ("b.c", '{"y": ["é", {"z": null}]}')
LLAMA_A, LLAMA_B = '{"name": "a", "parameters": {"x": 1}}', '{"name": "b.c", "arguments": {"y": ["é", {"z": null}]}}'
TEXTS: dict[ToolFormat, list[tuple[str, str, Found]]] = {
    "llama3_json": [
        (LLAMA_A, "", [A]),
        (f" \n{LLAMA_A}\n", "", [A]),
        (f"<|python_tag|>{LLAMA_A}; {LLAMA_B}", "", [A, B]),
        (f"{LLAMA_A};{LLAMA_B}", "", [A, B]),
        ("plain text", "plain text", []),
        ("<|python", "<|python", []),
        ('{"answer": 42}', '{"answer": 42}', []),
        ('{"name": "a", "parameters": {"x"', '{"name": "a", "parameters": {"x"', []),
        ('{"name": "a b", "parameters": {}}', '{"name": "a b", "parameters": {}}', []),
        ('{"name": "a", "parameters": {"x": NaN}}', '{"name": "a", "parameters": {"x": NaN}}', []),
        (f"It is {LLAMA_A}", f"It is {LLAMA_A}", []),
        (f"{LLAMA_A} and then", " and then", [A]),
        ("", "", []),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{LLAMA_A}]", "", [A]),
        (f"[TOOL_CALLS] [{LLAMA_A}, {LLAMA_B}]", "", [A, B]),
        (f"Let me see. [TOOL_CALLS][{LLAMA_A}]", "Let me see.", [A]),
        ('[TOOL_CALLS]a{"x": 1}', "", [A]),
        ('[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b.c[ARGS]{"y": ["é", {"z": null}]}', "", [A, B]),
        ("plain [TOOL", "plain [TOOL", []),
        ("[TOOL_CALLS]", "", []),
        ("[TOOL_CALLS]what is that", "what is that", []),
        ('[TOOL_CALLS][{"name": "a", "argum', '[{"name": "a", "argum', []),
        ("[TOOL_CALLS][1, 2]", "[1, 2]", []),
        ("[TOOL_CALLS][]", "[]", []),
    ],
    "pythonic": [
        ("[a(x=1)]", "", [A]),
        (" [a(x=1), b.c(y=['é', {'z': None}])]\n", "", [A, B]),
        ("[now()]", "", [("now", "{}")]),
        ("[1] According to", "[1] According to", []),
        ("[a(1)]", "[a(1)]", []),
        ("[a(x=b())]", "[a(x=b())]", []),
        ("[a(**{'x': 1})]", "[a(**{'x': 1})]", []),
        ("[a(x=1e999)]", "[a(x=1e999)]", []),
        ("[a(x=1)", "[a(x=1)", []),
        ("[]", "[]", []),
        ("plain [a(x=1)]", "plain [a(x=1)]", []),
        ("", "", []),
    ],
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"), [(name, *case) for name, cases in TEXTS.items() for case in cases]
)
def test_calls_are_found_however_the_text_is_cut(
    tool_format: ToolFormat, text: str, content: str, calls: Found, size: int
) -> None:
    assert parse(tool_format, text, size) == (content, calls)


@pytest.mark.parametrize("tool_format", READERS)
def test_what_a_prompt_shows_as_a_call_is_read_as_one(tool_format: ToolFormat) -> None:
    written = WORDINGS[tool_format].calls([("a", {"x": 1, "y": [None, "é'"]}), ("b", {})])
    content, calls = parse(tool_format, written, 3)
    assert content.strip() == ""
    assert calls == [("a", '{"x": 1, "y": [null, "é\'"]}'), ("b", "{}")]


@pytest.mark.parametrize("tool_format", READERS)
def test_text_goes_out_at_once(tool_format: ToolFormat) -> None:
    parser = ToolParser(ToolUse((), "auto", tool_format=tool_format))
    assert parser.feed("one two").content == "one two"


@pytest.mark.parametrize("tool_format", ["llama3_json", "mistral"])
def test_a_call_goes_out_when_it_is_complete(tool_format: Any) -> None:
    first = {"llama3_json": LLAMA_A, "mistral": '[TOOL_CALLS]a{"x": 1}'}[tool_format]
    parser = ToolParser(ToolUse((), "auto", tool_format=tool_format))
    assert all(not parser.feed(piece).calls for piece in first[:-1])
    assert len(parser.feed(first[-1]).calls) == 1
