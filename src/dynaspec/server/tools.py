"""Tools: which calls a request demands, and the calls in what a model writes.

A model writes calls in one of the formats of ``tool_formats``. Where the request demands a call, a JSON schema makes
the model write the call alone, without marks.
"""

from __future__ import annotations

import json
import secrets
import string
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dynaspec.contract.sampling_params import StructuredOutputsParams
from dynaspec.engine.chat_prompt import ToolFormat

from .errors import bad_request
from .params import form
from .protocol.chat import CalledFunction, CalledTool, ChatRequest, NamedToolChoice, Tool
from .tool_formats import READERS, SPECIAL_MARKS, Call, called, parsed

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
    tool_format: ToolFormat = "hermes"
    """Of ``auto``."""

    @property
    def needs_special_tokens(self) -> bool:
        """Calls show only in a text with its special tokens."""
        return self.mode == "auto" and self.tool_format in SPECIAL_MARKS

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


def tool_use(body: ChatRequest, tool_format: ToolFormat = "hermes") -> ToolUse:
    """
    Args:
        tool_format: how the model writes calls.

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
        return ToolUse(tools, "named", name, tool_format=tool_format)
    if choice == "required" and not tools:
        raise bad_request("tool_choice is 'required' without tools; expected at least one", param="tool_choice")
    if choice == "none" or not tools:
        return ToolUse()
    return ToolUse(tools, choice, one_call=body.parallel_tool_calls is False, tool_format=tool_format)


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
        self._reader = READERS[use.tool_format]()
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
            written = [{"name": self._use.name, "arguments": parsed(text)}]
        else:
            listed = parsed(text)
            written = listed if isinstance(listed, list) else []
        calls = [called(one) for one in written]
        return tuple(self._called(call) for call in calls if call is not None)

    def _scan(self, *, last: bool) -> Parsed:
        content, calls = "", []
        pieces, self._pending = self._reader.scan(self._pending, last=last)
        for piece in pieces:
            if isinstance(piece, str):
                content += self._content(piece)
            else:
                calls.append(self._called(piece))
                self._space = ""
        if last and not self.calls:
            content, self._space = content + self._space, ""
        return Parsed(content, tuple(calls))

    def _content(self, text: str) -> str:
        """What of a text is content by now: whitespace at its end may stand before a call."""
        whole = self._space + text
        body = whole.rstrip()
        self._space = whole[len(body) :]
        return body

    def _called(self, call: Call) -> CalledTool:
        name, arguments = call
        self.calls += 1
        return CalledTool(
            id=_call_id(self._use.tool_format),
            function=CalledFunction(name=name, arguments=_as_json(arguments)),
            index=self.calls - 1,
        )


def _call_id(tool_format: ToolFormat) -> str:
    """Mistral's templates take ids of nine letters and digits alone."""
    if tool_format == "mistral":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{uuid.uuid4().hex[:24]}"


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
