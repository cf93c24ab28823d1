from __future__ import annotations

from typing import Any

import pytest

from dynaspec.contract.errors import RequestError
from dynaspec.engine.chat_prompt import format_of, render
from dynaspec.engine.tokenizer import Tokenizer
from support.checkpoints import Pair

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
KNOWS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'user' and m.role != 'assistant' %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny: Pair) -> Tokenizer:
    return Tokenizer(tiny.target)


def prompt(tokenizer: Tokenizer, messages: Any, **options: Any) -> str:
    return render(tokenizer, messages, **{"tools": [TOOL], **options})


def test_a_template_that_knows_tools_gets_them(tokenizer: Tokenizer) -> None:
    shown = prompt(tokenizer, [{"role": "user", "content": "hi"}], template=KNOWS_TOOLS)
    assert shown.startswith('[{"type": "function"')
    assert "You may call" not in shown


def test_a_system_message_grows(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    shown = prompt(tokenizer, messages)
    assert shown.startswith("[system] Be brief.\n\nYou may call functions")
    assert shown.count("[system]") == 1


def test_where_there_is_no_system_message_the_user_tells_of_tools(tokenizer: Tokenizer) -> None:
    shown = prompt(tokenizer, [{"role": "user", "content": "hi"}], template=NO_SYSTEM)
    assert shown.startswith("<user>You may call functions")
    assert shown.endswith("\n\nhi\n")


def test_results_in_a_row_are_one_message(tokenizer: Tokenizer) -> None:
    calls = [{"id": str(i), "type": "function", "function": {"name": "add", "arguments": {"x": i}}} for i in (1, 2)]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": str(i), "content": str(i)} for i in (1, 2)),
    ]
    shown = prompt(tokenizer, messages, template=NO_SYSTEM, tool_format="pythonic")
    assert (
        "<assistant>Well.\n[add(x=1), add(x=2)]\n<user>The functions returned: 1\nThe functions returned: 2\n" in shown
    )


def test_without_tools_messages_are_as_openai_has_them(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert prompt(tokenizer, messages, tools=[]) == "[user] a\nb\n[assistant] "
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(RequestError, match="expected pieces of text"):
        prompt(tokenizer, image)


@pytest.mark.parametrize(
    "call", [{}, {"function": {"name": "a", "arguments": "{"}}, {"function": {"arguments": {}}}, 3]
)
def test_a_call_that_is_none(tokenizer: Tokenizer, call: Any) -> None:
    with pytest.raises(RequestError, match="expected a function"):
        prompt(tokenizer, [{"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize("messages", [[], ["hi"], [{"role": "user"}]])
def test_messages_that_are_none(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(RequestError, match="expected"):
        prompt(tokenizer, messages)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("… [TOOL_CALLS] …", "mistral"),
        ("… <tool_call> …", "hermes"),
        ("… <|python_tag|> …", "llama3_json"),
        ('Respond with {"name": …, "parameters": …}', "llama3_json"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_format_that_a_template_mentions(template: str, found: str) -> None:
    assert format_of(template) == found
