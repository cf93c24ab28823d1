"""Structured outputs: what a request's output may be, in the words of llguidance, and compiled over one vocabulary.

Compilation takes time and memory in proportion to the text, or is cut short by the library's own limits. What it does
not limit is limited here. ``DeadEnd`` is the end of a request whose rules leave no token.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from json import JSONDecodeError, JSONDecoder, dumps, loads
from math import lcm
from threading import Lock
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask

from dynaspec.contract.errors import RequestError
from dynaspec.contract.sampling_params import StructuredOutputsParams

_LONGEST = 2**18
_LONGEST_GBNF = 2**15
"""Characters. GBNF is translated to Lark's syntax, in a time that grows with the square of the rules."""
_MOST_REMAINDERS = 10_000
"""Whether some number is a multiple takes as many states as there are remainders, of all ``multipleOf`` together."""
_GBNF_RULE = re.compile(r"[\w-]+\s*::=")
Bits = npt.NDArray[np.int32]
_LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=50_000, verbose_errors=False)
"""Compiling may take as much as the library allows, as only its own request waits: enough for tens of thousands of
choices. Masks, which everyone waits for, may take less: they are given up after about 10 ms."""
_LONGEST_REASON = 300
_EXCERPT = re.compile(r"\s*(\d+ \||\^+\s*$|<non-verbose/>)")
"""Lines that show where in a grammar's text an error is."""


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


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """No token may follow a request's output."""

    finish_reason: Literal["stop", "error"]
    """``stop`` if the output has the form asked for, though no token that ends it may follow."""
    why: str | None
    """A sentence, for errors."""


class Grammar:
    """A form, compiled. Safe to use from several threads.

    Its matchers share what they learn about the form, so that masks get cheaper.
    """

    def __init__(self, text: str, tokenizer: LLTokenizer) -> None:
        """
        Args:
            text: llguidance's, see ``grammar_text``.
            tokenizer: of the vocabulary.

        Raises:
            RequestError: it cannot be compiled, or no output has this form.
        """
        self.eos_tokens: tuple[int, ...] = tuple(tokenizer.eos_tokens)
        """The tokens that masks allow where the output may end."""
        self.words = -(-tokenizer.vocab_size // 32)
        """Integers in a mask."""
        self._text = text
        self._tokenizer = tokenizer
        self._compiled = self._compile()
        fault = fault_of(self._compiled)
        if not fault:  # what is too large, or impossible, may show in the first mask only
            first = self.matcher()
            fill_next_token_bitmask(first, np.empty((1, self.words), np.int32))
            fault = fault_of(first)
        if fault:
            raise RequestError(f"structured_outputs cannot be used: {fault}")

    def matcher(self) -> LLMatcher:
        """A new one, before the first token."""
        return self._compiled.deep_copy()

    def renew(self) -> LLMatcher:
        """The same, sharing nothing with matchers made before: what they have learned together may be too much."""
        self._compiled = self._compile()
        return self.matcher()

    def _compile(self) -> LLMatcher:
        return LLMatcher(self._tokenizer, self._text, log_level=0, limits=_LIMITS)


class GrammarCompiler:
    """Compiles each form once, while it is in use now and then. Safe to use from several threads."""

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int], *, capacity: int = 64
    ) -> None:
        """
        Args:
            tokenizer_json: gives the text of the model's ``tokenizer.json``; called once, before the first grammar.
            vocab_size: tokens of the model, or of the tokenizer if it has more.
            eos_token_ids: the model's.
            capacity: forms kept.
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids) or None
        self._capacity = capacity
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[StructuredOutputsParams, Future[Grammar | str]] = OrderedDict()
        """The grammar of each form, or why it has none; oldest use first."""
        self._lock = Lock()

    def compile(self, form: StructuredOutputsParams) -> Grammar:
        """
        Raises:
            RequestError: it cannot be compiled, or no output has this form.
        """
        with self._lock:
            known = self._known.get(form)
            ours = known is None
            if known is None:
                known = self._known[form] = Future()
            self._known.move_to_end(form)
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)
        if ours:
            try:
                known.set_result(self._compile(form))
            except BaseException as error:
                known.set_exception(error)
                with self._lock:
                    self._known.pop(form, None)
        grammar = known.result()
        if isinstance(grammar, str):
            raise RequestError(grammar)
        return grammar

    def _compile(self, form: StructuredOutputsParams) -> Grammar | str:
        try:
            return Grammar(grammar_text(form), self._vocabulary())
        except RequestError as error:
            return str(error)

    def _vocabulary(self) -> LLTokenizer:
        """
        Raises:
            RequestError: the library does not know tokenizers of this kind.
        """
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                    )
                except ValueError as error:
                    raise RequestError(f"structured_outputs do not go with the model's tokenizer: {error}") from None
            return self._tokenizer


def fault_of(matcher: LLMatcher) -> str:
    """Why a matcher cannot go on, in a few words; empty if it can, or stands at the form's end."""
    if not matcher.is_error():
        return ""
    lines = [line for line in matcher.get_error().splitlines() if not _EXCERPT.match(line)]
    reason = " ".join(" ".join(lines).split())
    if reason == "NoExtensionBias":
        return "no token of the vocabulary fits"
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}…"
