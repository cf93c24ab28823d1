"""A request's form in the words of llguidance, and what is too much to compile.

Compilation takes time and memory in proportion to the text, or is cut short by the library's own limits. What it does
not limit is limited here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from json import JSONDecodeError, JSONDecoder, dumps, loads
from math import lcm
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from dynaspec.contract.errors import RequestError
from dynaspec.contract.structured_outputs import StructuredOutputsParams

_LONGEST = 2**18
_LONGEST_GBNF = 2**15
"""Characters. GBNF is translated to Lark's syntax, in a time that grows with the square of the rules."""
_MOST_REMAINDERS = 10_000
"""Whether some number is a multiple takes as many states as there are remainders, of all ``multipleOf`` together."""
_GBNF_RULE = re.compile(r"[\w-]+\s*::=")


def grammar_text(form: StructuredOutputsParams) -> str:
    """llguidance's JSON for a form; not compiled yet.

    Raises:
        RequestError: too long, not GBNF though it looks like it, or remainders by too large numbers.
    """
    for name in ("json", "regex", "grammar", "whitespace_pattern"):
        _check_length(f"structured_outputs.{name}", len(getattr(form, name) or ""), _LONGEST)
    _check_length("structured_outputs.choice", sum(map(len, form.choice or ())), _LONGEST)
    if form.regex is not None:
        return str(LLMatcher.grammar_from_regex(form.regex))
    if form.choice is not None:
        # One terminal: as rules of the grammar, the choices that are still open would each be followed on their own.
        return _text(lark_grammar="start: CHOICE\nCHOICE: " + " | ".join(map(dumps, form.choice)))
    if form.grammar is not None:
        lark = _lark(form.grammar)
        _check_remainders(_schemas_within(lark))
        return _text(lark_grammar=lark)
    schema = {"type": "object"} if form.json_object else loads(str(form.json))
    _check_remainders([schema])
    return _text(json_schema=_with_whitespace(schema, form))


def _text(**grammar: Any) -> str:
    return dumps({"grammars": [grammar]})


def _with_whitespace(schema: Any, form: StructuredOutputsParams) -> Any:
    """A schema with llguidance's options about whitespace in it."""
    options: dict[str, Any] = {}
    if form.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if form.whitespace_pattern is not None:
        options["whitespace_pattern"] = form.whitespace_pattern
    if not options or schema is False:
        return schema
    schema = {} if schema is True else schema
    return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **options}}


def _lark(grammar: str) -> str:
    if not any(_GBNF_RULE.match(line.strip()) for line in grammar.splitlines()):
        return grammar
    _check_length("structured_outputs.grammar in GBNF", len(grammar), _LONGEST_GBNF)
    try:
        return str(gbnf_to_lark(grammar))
    except RecursionError:
        raise RequestError("structured_outputs.grammar is nested too deeply; expected fewer levels") from None
    except Exception as error:  # the translator raises bare exceptions
        raise RequestError(f"structured_outputs.grammar is not GBNF: {error}") from None


def _schemas_within(lark: str) -> Iterator[Any]:
    """The JSON schemas that a Lark grammar holds."""
    decoder = JSONDecoder()
    for match in re.finditer(r"%json\s*(?=\S)", lark):
        try:
            yield decoder.raw_decode(lark, match.end())[0]
        except (JSONDecodeError, RecursionError) as error:
            raise RequestError(f"structured_outputs.grammar has %json without JSON behind it: {error}") from None


def _check_remainders(schemas: Iterable[Any]) -> None:
    common = lcm(*(_slow_part(value) for schema in schemas for value in _multiples(schema)))
    if common > _MOST_REMAINDERS:
        raise RequestError(
            f"the schema's multipleOf have the common multiple {common}, factors 2 and 5 left out; "
            f"expected one of at most {_MOST_REMAINDERS}"
        )


def _multiples(schema: Any) -> Iterator[int | float]:
    """The values of ``multipleOf`` anywhere in a schema."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            value = part.get("multipleOf")
            if isinstance(value, int | float) and value:
                yield value
            left += part.values()
        elif isinstance(part, list):
            left += part


def _slow_part(value: int | float) -> int:
    """A number's digits without factors of ten's: the last digits alone tell whether those divide."""
    digits = int("".join(map(str, Decimal(str(value)).as_tuple().digits)))
    for factor in (2, 5):
        while digits and digits % factor == 0:
            digits //= factor
    return max(digits, 1)


def _check_length(name: str, length: int, most: int) -> None:
    if length > most:
        raise RequestError(f"{name} has {length} characters; expected at most {most}")
