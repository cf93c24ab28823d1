"""What form one request's output must have. Names and meaning are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from json import JSONDecodeError, dumps, loads
from typing import Any

from .errors import RequestError

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of ``json``, ``regex``, ``choice``, ``grammar`` and ``json_object``; validated when built.

    Only the form of these is checked here. What a schema, an expression or a grammar says is compiled when its request
    arrives, and refused then if it cannot be.

    Raises:
        RequestError: none of them or several, a value of the wrong kind, or an option that does not go with them.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as a mapping or as text; kept as text."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Sequence[str] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """A context-free grammar: in Lark's syntax with a rule ``start``, or in GBNF's with a rule ``root``."""
    json_object: bool | None = None
    """The output is a JSON object, whatever it holds."""
    whitespace_pattern: str | None = None
    """A regular expression of what may stand between the parts of JSON; None = any whitespace."""
    disable_any_whitespace: bool = False
    """No whitespace between the parts of JSON."""

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; "
                f"expected exactly one of {', '.join(_KINDS)}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if not isinstance(self.json_object, bool | None):
            raise RequestError(f"structured_outputs.json_object is {self.json_object!r}; expected True or False")
        self._check_whitespace()

    def _check_whitespace(self) -> None:
        if not isinstance(self.disable_any_whitespace, bool):
            raise RequestError(
                f"structured_outputs.disable_any_whitespace is {self.disable_any_whitespace!r}; expected True or False"
            )
        if self.whitespace_pattern is None and not self.disable_any_whitespace:
            return
        if self.json is None and not self.json_object:
            raise RequestError(
                "structured_outputs has whitespace_pattern or disable_any_whitespace without JSON; "
                "expected them with json or json_object only"
            )
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                "structured_outputs has whitespace_pattern and disable_any_whitespace; expected at most one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """Older vLLMs' name of ``StructuredOutputsParams``.

    Args:
        backend: of no effect: there is only one grammar engine.
    """

    backend: InitVar[str | None] = None

    def __post_init__(self, backend: str | None) -> None:
        StructuredOutputsParams.__post_init__(self)


def _schema(schema: object) -> str:
    """The text of a schema: a mapping is written down, so that the caller's later changes do not reach the engine."""
    if isinstance(schema, str):
        _check_text("json", schema)
    try:
        text = schema if isinstance(schema, str) else dumps(schema, allow_nan=False)
        well_formed = isinstance(loads(text), dict | bool)
    except JSONDecodeError as error:
        raise RequestError(f"structured_outputs.json is not JSON: {error}") from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured_outputs.json holds what JSON cannot: {error}") from None
    except RecursionError:
        raise RequestError("structured_outputs.json is nested too deeply; expected fewer levels") from None
    if not well_formed or isinstance(schema, bool):
        raise RequestError(
            f"structured_outputs.json is {_shown(schema)}; expected a JSON schema, as a mapping or as text"
        )
    return text


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str | bytes) or not isinstance(choices, Sequence) or not choices:
        raise RequestError(f"structured_outputs.choice is {_shown(choices)}; expected a list of strings")
    for string in choices:
        _check_text("choice", string)
    return tuple(choices)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"structured_outputs.{name} holds {_shown(value)}; expected non-empty text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"structured_outputs.{name} is not valid Unicode at character {error.start}; expected text"
        ) from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
