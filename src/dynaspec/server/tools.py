"""Tools: which calls a request demands, and the calls in what a model writes.

Models that were trained with tools in the manner of Hermes and Qwen write a call as
``<tool_call>{"name": …, "arguments": {…}}</tool_call>``. Where the request demands a call, a JSON schema makes the
model write the call alone, without tags.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from dynaspec.contract.sampling_params import StructuredOutputsParams

from .errors import bad_request
from .forms import form
from .protocol.chat import CalledFunction, CalledTool, ChatRequest
from .protocol.messages import NamedToolChoice, Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DEFINITIONS = ("$defs", "definitions")
"""Where schemas keep what they refer to, from their root."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request's answers may call tools.

    Args:
        offered: tools that the prompt describes.
        mode: ``none``: text is text; ``auto``: calls are found in the text; ``required``: the text is a list of calls;
            ``named``: the text is the arguments for ``name``.
    """

    offered: tuple[Tool, ...] = ()
    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    one_call: bool = False
    """Of ``required``."""

    def form(self) -> StructuredOutputsParams | None:
        """The form of output that makes the model call; None where it need not.

        Raises:
            ApiError: the tools' schemas cannot be used together.
        """
        if self.mode == "named":
            [tool] = [tool for tool in self.offered if tool.function.name == self.name]
            return _calls_form(_parameters(tool))
        if self.mode == "required":
            return _calls_form(_calls_schema(self.offered, one_call=self.one_call))
        return None


def tool_use(body: ChatRequest) -> ToolUse:
    """
    Raises:
        ApiError: a choice among tools that are not there.
    """
    tools, choice = tuple(body.tools or ()), body.tool_choice or "auto"
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name; expected a name for each", param="tools")
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            raise bad_request(f"tool_choice names {name!r}; expected one of the tools", param="tool_choice")
        return ToolUse(tools, "named", name)
    if choice == "required" and not tools:
        raise bad_request("tool_choice is 'required' without tools; expected at least one", param="tool_choice")
    if choice == "none" or not tools:
        return ToolUse()
    return ToolUse(tools, choice, one_call=body.parallel_tool_calls is False)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text brought."""

    content: str = ""
    calls: tuple[CalledTool, ...] = ()


class ToolParser:
    """Finds the calls in an answer, however its text is cut into pieces.

    Calls come as a whole. What looks like a call but is none stays text, and so does an unfinished one at the end.
    Whitespace around calls is dropped.
    """

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._pending = ""
        """Neither content nor a call yet."""
        self._space = ""
        """Whitespace that is content only if more content follows."""
        self.calls = 0
        """Found so far."""

    def feed(self, text: str) -> Parsed:
        """The next piece."""
        if self._use.mode == "none":
            return Parsed(text)
        self._pending += text
        return Parsed() if self._use.mode != "auto" else self._scan(last=False)

    def finish(self) -> Parsed:
        """There is no more."""
        if self._use.mode == "none":
            return Parsed()
        if self._use.mode == "auto":
            return self._scan(last=True)
        text, self._pending = self._pending, ""
        calls = self._demanded(text)
        return Parsed("" if calls else text, calls)

    def _demanded(self, text: str) -> tuple[CalledTool, ...]:
        """The calls that all of the text stands for; none if it was cut short."""
        if self._use.mode == "named":
            written = [{"name": self._use.name, "arguments": _parsed(text)}]
        else:
            listed = _parsed(text)
            written = listed if isinstance(listed, list) else []
        calls = [self._called(one) for one in written]
        return tuple(call for call in calls if call is not None)

    def _scan(self, *, last: bool) -> Parsed:
        content, calls = "", []
        while (start := self._pending.find(_OPEN)) >= 0:
            end = self._pending.find(_CLOSE, start)
            if end < 0:
                break
            content += self._content(self._pending[:start])
            call = self._called(_parsed(self._pending[start + len(_OPEN) : end]))
            end += len(_CLOSE)
            if call is None:
                content += self._content(self._pending[start:end])
            else:
                calls.append(call)
                self._space = ""
            self._pending = self._pending[end:]
        settled = len(self._pending) if last else start if start >= 0 else _before_tag(self._pending)
        content += self._content(self._pending[:settled])
        self._pending = self._pending[settled:]
        if last and not self.calls:
            content, self._space = content + self._space, ""
        return Parsed(content, tuple(calls))

    def _content(self, text: str) -> str:
        """What of a text is content by now: whitespace at its end may stand before a call."""
        whole = self._space + text
        body = whole.rstrip()
        self._space = whole[len(body) :]
        return body

    def _called(self, written: Any) -> CalledTool | None:
        if not isinstance(written, Mapping):
            return None
        name = written.get("name")
        arguments = written.get("arguments", written.get("parameters"))
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, Mapping):
            return None
        self.calls += 1
        return CalledTool(
            id=f"call_{uuid.uuid4().hex[:24]}",
            function=CalledFunction(name=name, arguments=_as_json(arguments)),
            index=self.calls - 1,
        )


def _before_tag(text: str) -> int:
    """How much of a text cannot be the beginning of a tag."""
    longest = min(len(text), len(_OPEN) - 1)
    return next((len(text) - k for k in range(longest, 0, -1) if _OPEN.startswith(text[-k:])), len(text))


def _parsed(text: str) -> Any:
    """JSON's value; None if it is none."""
    try:
        return json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _as_json(value: Any) -> str:
    """Readable, unless it holds half a surrogate pair, which only an escape can say."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or text == text.encode("utf-8", "replace").decode() else json.dumps(value)


def _calls_form(schema: Mapping[str, Any]) -> StructuredOutputsParams:
    """No more than a space between the parts: some models would never come to an end of them."""
    return form({"json": schema, "whitespace_pattern": " ?"}, param="tools")


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    if tool.function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | tool.function.parameters


def _calls_schema(tools: Sequence[Tool], *, one_call: bool) -> dict[str, Any]:
    """A list of calls; what the tools' schemas define for themselves is brought to its root."""
    shared: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        parameters = _parameters(tool)
        for key in _DEFINITIONS:
            _share(shared, key, parameters.pop(key, {}))
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **shared}
    return schema | ({"maxItems": 1} if one_call else {})


def _share(shared: dict[str, dict[str, Any]], key: str, definitions: Any) -> None:
    if not isinstance(definitions, Mapping):
        raise bad_request(f"{key} of a tool's parameters is no object; expected definitions by name", param="tools")
    for name, schema in definitions.items():
        if shared.setdefault(key, {}).setdefault(name, schema) != schema:
            raise bad_request(
                f"two tools define {name!r} differently in {key}; expected another name for one of them", param="tools"
            )
