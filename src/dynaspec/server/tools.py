"""Tools: which calls a request demands, and the calls in what a model writes.

A model writes calls in the format that it was trained with. Where the request demands a call, a JSON schema makes the
model write the call alone, without marks. The names of the formats are those of vLLM's parsers
(``--tool-call-parser``); what they look like:

* ``hermes``: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` anywhere in the text.
* ``llama3_json``: the text is ``{"name": …, "parameters": {…}}``, several with ``;`` between them.
* ``mistral``: ``[TOOL_CALLS]`` and a list of such objects, or ``[TOOL_CALLS]name{…}`` for each call.
* ``pythonic``: the text is ``[name(parameter=value), …]``.

A reader is given the text so far that has not been settled, and settles as much of it as it can: some of it is content,
some is calls. So text goes out as soon as it can be no call, and calls as soon as they are complete.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol

from dynaspec.contract.sampling_params import StructuredOutputsParams
from dynaspec.engine.chat_prompt import ToolFormat

from .errors import bad_request
from .inputs import form
from .protocol.chat import CalledFunction, CalledTool, ChatRequest, NamedToolChoice, Tool

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
        return self.mode == "auto" and self.tool_format in _SPECIAL_MARKS

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
            written = [{"name": self._use.name, "arguments": _from_json(text)}]
        else:
            listed = _from_json(text)
            written = listed if isinstance(listed, list) else []
        calls = [_as_call(one) for one in written]
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


# --- the formats ---

Call = tuple[str, Mapping[str, Any]]
"""A function's name and its arguments."""
Piece = str | Call
"""Content, or a call."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Reader(Protocol):
    """Finds calls in one answer."""

    def scan(self, text: str, *, last: bool) -> tuple[list[Piece], str]:
        """
        Args:
            text: what has come and was not settled before.
            last: there is no more.

        Returns:
            What is settled, in its order, and the rest; with ``last`` there is no rest.
        """
        ...


class HermesReader:
    """Tags around JSON objects."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def scan(self, text: str, *, last: bool) -> tuple[list[Piece], str]:
        """See ``Reader``. What looks like a call but is none stays content."""
        pieces: list[Piece] = []
        while (start := text.find(self._OPEN)) >= 0 and (end := text.find(self._CLOSE, start)) >= 0:
            call = _as_call(_from_json(text[start + len(self._OPEN) : end]))
            end += len(self._CLOSE)
            pieces += [text[:start], text[start:end] if call is None else call]
            text = text[end:]
        settled = len(text) if last else start if start >= 0 else _before(text, self._OPEN)
        return [*pieces, text[:settled]], text[settled:]


@dataclass(slots=True)
class Llama3Reader:
    """JSON objects that are all of the text, behind ``<|python_tag|>`` or not."""

    _TAG = "<|python_tag|>"
    _BETWEEN = "; \t\r\n"
    _called: bool = False
    """There has been a call."""
    _content: bool = False
    """From here on there are no calls."""

    def scan(self, text: str, *, last: bool) -> tuple[list[Piece], str]:
        """See ``Reader``."""
        pieces: list[Piece] = []
        while not self._content:
            body = text.lstrip(self._BETWEEN) if self._called else text.lstrip()
            if not body or (self._TAG.startswith(body) and not last):
                return pieces, "" if last else text
            body = body.removeprefix(self._TAG).lstrip()
            found = _first_json(body) if body.startswith("{") else None
            if found is None and body[:1] in ("", "{") and not last:
                return pieces, text
            call = None if found is None else _as_call(found[0])
            if found is None or call is None:
                self._content = True
                break
            pieces.append(call)
            self._called = True
            text = body[found[1] :]
        return [*pieces, text], ""


@dataclass(slots=True)
class MistralReader:
    """A marker, then calls to the end of the text."""

    _MARK = "[TOOL_CALLS]"
    _ARGUMENTS = "[ARGS]"
    _HEAD = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[ARGS\])?\s*(?=\{)")
    _OPEN_HEAD = re.compile(r"\s*[A-Za-z0-9_.-]{0,64}\s*(\[[A-Z]*\]?)?\s*")
    _behind: bool = False
    """The marker has been read."""
    _content: bool = False

    def scan(self, text: str, *, last: bool) -> tuple[list[Piece], str]:
        """See ``Reader``."""
        pieces: list[Piece] = []
        while not self._content:
            if not self._behind:
                start = text.find(self._MARK)
                settled = len(text) if last and start < 0 else start if start >= 0 else _before(text, self._MARK)
                pieces.append(text[:settled])
                if start < 0:
                    return pieces, text[settled:]
                text, self._behind = text[start + len(self._MARK) :], True
            body = text.lstrip(", \t\r\n").removeprefix(self._MARK)
            if not body and not last:
                return pieces, text
            calls, end = self._calls(body)
            if calls is None:
                if not last and self._may_go_on(body):
                    return pieces, text
                self._content = True
                break
            pieces += calls
            text = body[end:]
        return [*pieces, text], ""

    def _calls(self, text: str) -> tuple[list[Call] | None, int]:
        """The calls at the beginning of a text, if they are complete, and where they end."""
        head = self._HEAD.match(text)
        found = _first_json(text[head.end() :] if head else text)
        if found is None:
            return None, 0
        value, end = found
        if head:
            return ([(head[1], value)], head.end() + end) if isinstance(value, Mapping) else (None, 0)
        calls = [_as_call(one) for one in (value if isinstance(value, list) else [value])]
        complete = [call for call in calls if call is not None]
        return (complete, end) if calls and len(complete) == len(calls) else (None, 0)

    def _may_go_on(self, text: str) -> bool:
        """More text could make calls of it."""
        head = self._HEAD.match(text)
        rest = text[head.end() :] if head else text
        if rest[:1] in ("{", "["):
            return _first_json(rest) is None
        return self._OPEN_HEAD.fullmatch(text) is not None or self._MARK.startswith(text)


@dataclass(slots=True)
class PythonicReader:
    """A list of calls with literal arguments that is all of the text."""

    _BEGUN = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(.*)?)?", re.DOTALL)
    _content: bool = field(default=False)

    def scan(self, text: str, *, last: bool) -> tuple[list[Piece], str]:
        """See ``Reader``."""
        body = text.strip()
        if not self._content and not body and not last:
            return [], text
        if self._content or not self._BEGUN.fullmatch(body):
            self._content = True
            return [text], ""
        calls = _python_calls(body) if body.endswith("]") else None
        if calls is not None:
            self._content = True
            return [*calls], ""
        return ([text], "") if last else ([], text)


READERS: Mapping[ToolFormat, Callable[[], Reader]] = {
    "hermes": HermesReader,
    "llama3_json": Llama3Reader,
    "mistral": MistralReader,
    "pythonic": PythonicReader,
}
_SPECIAL_MARKS = frozenset[ToolFormat]({"mistral"})
"""Formats whose marks are special tokens, so that a text without these would not show the calls."""


def _as_call(written: Any) -> Call | None:
    """A call as JSON has it; None if it is none."""
    if not isinstance(written, Mapping):
        return None
    name = written.get("name")
    arguments = written.get("arguments", written.get("parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, Mapping):
        return None
    return name, arguments


def _from_json(text: str) -> Any:
    """JSON's value; None if it is none."""
    try:
        return json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None


def _first_json(text: str) -> tuple[Any, int] | None:
    """The value that a text begins with, and where it ends; None if it is not complete, or none."""
    try:
        return _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_json)


def _python_calls(text: str) -> list[Call] | None:
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        calls = [_python_call(one) for one in tree.elts]
        json.dumps([arguments for _, arguments in calls], allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls


def _python_call(node: ast.expr) -> Call:
    """
    Raises:
        ValueError: no call, or arguments that are no literals by name.
    """
    if not isinstance(node, ast.Call) or node.args or not _NAME.fullmatch(name := ast.unparse(node.func)):
        raise ValueError("no call")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("arguments without names")
    return name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}


def _before(text: str, mark: str) -> int:
    """How much of a text cannot be the beginning of a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((len(text) - k for k in range(longest, 0, -1) if mark.startswith(text[-k:])), len(text))
