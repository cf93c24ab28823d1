"""Calls of tools in what a model writes, in each format that models are trained with.

A reader is given the text so far that has not been settled, and settles as much of it as it can: some of it is content,
some is calls. So text goes out as soon as it can be no call, and calls as soon as they are complete. The names of the
formats are those of vLLM's parsers (``--tool-call-parser``); what they look like:

* ``hermes``: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` anywhere in the text.
* ``llama3_json``: the text is ``{"name": …, "parameters": {…}}``, several with ``;`` between them.
* ``mistral``: ``[TOOL_CALLS]`` and a list of such objects, or ``[TOOL_CALLS]name{…}`` for each call.
* ``pythonic``: the text is ``[name(parameter=value), …]``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from dynaspec.engine.chat_prompt import ToolFormat

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
            call = called(parsed(text[start + len(self._OPEN) : end]))
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
            call = None if found is None else called(found[0])
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
        calls = [called(one) for one in (value if isinstance(value, list) else [value])]
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
SPECIAL_MARKS = frozenset[ToolFormat]({"mistral"})
"""Formats whose marks are special tokens, so that a text without these would not show the calls."""


def called(written: Any) -> Call | None:
    """A call as JSON has it; None if it is none."""
    if not isinstance(written, Mapping):
        return None
    name = written.get("name")
    arguments = written.get("arguments", written.get("parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, Mapping):
        return None
    return name, arguments


def parsed(text: str) -> Any:
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
