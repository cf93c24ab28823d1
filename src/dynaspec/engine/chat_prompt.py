"""From a conversation with tools to a prompt, also where the chat template has no place for tools.

Such a template gets the same conversation in words: a system message that describes the tools and how to call them,
calls and results as text. The forms of calls are those that models are trained with; the server's parsers
(``server.tools``) read them back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dynaspec.contract.errors import RequestError

from .tokenizer import Message, Tokenizer, check_messages

ToolFormat = Literal["hermes", "llama3_json", "mistral", "pythonic"]
"""How calls are written; the names are those of vLLM's parsers."""

Call = tuple[str, Mapping[str, Any]]
"""A function's name and its arguments."""


@dataclass(frozen=True, slots=True)
class Wording:
    """How a format puts tools, calls and results into words."""

    how_to_call: str
    calls: Callable[[Sequence[Call]], str]
    result: Callable[[str], str]


_PROBE: Sequence[Message] = ({"role": "user", "content": "?"},)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]],
    tool_format: ToolFormat | None = None,
    template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a chat template, which shows the tools.

    Args:
        messages: as OpenAI has them: content may be pieces of text, calls' arguments JSON text.
        tools: those that the model may call, as OpenAI's objects.
        tool_format: for templates without tools; None = the one that the template mentions, else ``hermes``.
        template: Jinja; None = the checkpoint's.
        variables: more variables for the template.

    Raises:
        RequestError: the template refuses the messages, or they are none.
    """
    check_messages(messages)
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools holds {tool!r}; expected a list of objects, as OpenAI has them")
    told = [_told(message) for message in messages]

    def rendered(chat: Sequence[Message], offered: Sequence[Mapping[str, Any]] | None) -> str:
        return tokenizer.render_chat(
            chat,
            template=template,
            tools=offered,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message and chat is not _PROBE,
            variables=variables,
        )

    if not tools:
        return rendered(told, None)
    # Asked of another chat: a template without tools may refuse their results in this one.
    if rendered(_PROBE, tools) != rendered(_PROBE, None):
        return rendered(told, tools)
    wording = WORDINGS[tool_format or format_of(template or tokenizer.chat_template)]
    chat, description = _in_words(told, wording), _described(tools, wording)
    try:
        return rendered(_with_system(chat, description), None)
    except RequestError:  # some templates have no system message
        return rendered(_with_user(chat, description), None)


def format_of(template: str) -> ToolFormat:
    """The format of calls that a template mentions; ``hermes`` if none."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters":' in template):
        return "llama3_json"
    return "hermes"


def _described(tools: Sequence[Mapping[str, Any]], wording: Wording) -> str:
    listed = "\n".join(_json(tool) for tool in tools)
    return (
        "You may call functions to answer. They are described in JSON, one a line:\n"
        f"<tools>\n{listed}\n</tools>\n{wording.how_to_call}\n"
        "Call no other functions. Answer in plain text where none is of use."
    )


def _with_system(chat: Sequence[Message], text: str) -> list[Message]:
    first = chat[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *chat]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *chat[1:]]


def _with_user(chat: Sequence[Message], text: str) -> list[Message]:
    for i, message in enumerate(chat):
        if message["role"] == "user":
            return [*chat[:i], {**message, "content": f"{text}\n\n{message['content']}"}, *chat[i + 1 :]]
    return [{"role": "user", "content": text}, *chat]


def _in_words(messages: Sequence[Message], wording: Wording) -> list[Message]:
    """Without calls, and with results as the user's words; those that follow each other are one message."""
    chat: list[Message] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(wording.result(str(message["content"])))
            continue
        if results:
            chat.append({"role": "user", "content": "\n".join(results)})
            results = []
        calls = message.get("tool_calls")
        if calls:
            written = wording.calls([(one["function"]["name"], one["function"]["arguments"]) for one in calls])
            message = {"role": message["role"], "content": "\n".join(filter(None, (message.get("content"), written)))}
        chat.append(message)
    if results:
        chat.append({"role": "user", "content": "\n".join(results)})
    return chat


def _told(message: Message) -> Message:
    """A message as templates know it: content in one piece, arguments as objects."""
    told = dict(message)
    if isinstance(told.get("content"), list):
        told["content"] = "\n".join(_piece(part) for part in told["content"])
    if told.get("tool_calls"):
        told["content"] = told.get("content") or ""
        told["tool_calls"] = [_called(call) for call in told["tool_calls"]]
    return told


def _piece(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise RequestError(f"a chat message's content holds {part!r}; expected pieces of text")
    return text


def _called(call: Any) -> Any:
    try:
        function = call["function"]
        arguments = function["arguments"]
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        function["name"]  # must be there
    except (KeyError, TypeError, ValueError):
        parsed = None
    if not isinstance(parsed, Mapping):
        raise RequestError(f"a tool call is {call!r}; expected a function with a name and arguments, a JSON object")
    return {**call, "function": {**function, "arguments": parsed}}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    written = (_json({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written)


def _llama3(calls: Sequence[Call]) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def _mistral(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS]" + _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def _pythonic(calls: Sequence[Call]) -> str:
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return f"[{', '.join(written)}]"


WORDINGS: Mapping[ToolFormat, Wording] = {
    "hermes": Wording(
        'To call one, write a JSON object between tags: <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>',
        _hermes,
        lambda text: f"<tool_response>\n{text}\n</tool_response>",
    ),
    "llama3_json": Wording(
        'To call one, write this JSON object and nothing else: {"name": NAME, "parameters": OBJECT}',
        _llama3,
        lambda text: f"The function returned: {text}",
    ),
    "mistral": Wording(
        'To call some, write their list: [TOOL_CALLS][{"name": NAME, "arguments": OBJECT}]',
        _mistral,
        lambda text: f"[TOOL_RESULTS]{_json({'content': text})}[/TOOL_RESULTS]",
    ),
    "pythonic": Wording(
        "To call some, write a list of calls as in Python and nothing else: [NAME(PARAMETER=VALUE)]",
        _pythonic,
        lambda text: f"The functions returned: {text}",
    ),
}
