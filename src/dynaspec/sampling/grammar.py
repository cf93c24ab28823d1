"""Structured outputs, compiled: what a request's output may be, over one vocabulary. By the library llguidance."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from dynaspec.contract.errors import RequestError
from dynaspec.contract.structured_outputs import StructuredOutputsParams

from .grammar_text import grammar_text

Bits = npt.NDArray[np.int32]

_LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=50_000, verbose_errors=False)
"""Compiling may take as much as the library allows, as only its own request waits: enough for tens of thousands of
choices. Masks, which everyone waits for, may take less: they are given up after about 10 ms."""
_LONGEST_REASON = 300
_EXCERPT = re.compile(r"\s*(\d+ \||\^+\s*$|<non-verbose/>)")
"""Lines that show where in a grammar's text an error is."""


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
