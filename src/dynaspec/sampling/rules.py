"""One request's sampling parameters, compiled into what the processors need.

Here is also checked that a grammar and the token lists of the same request leave a first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynaspec.contract.errors import RequestError
from dynaspec.contract.sampling_params import SamplingParams

from .grammar import Grammar
from .grammar_state import GrammarState
from .rng import Int64

LOWEST_TEMPERATURE = 0.01
"""Lower temperatures above 0 act like this one, as in vLLM: beyond it scores overflow."""


class Needs:
    """Bits that say which processors a request's rows must pass. Plain integers: an IntFlag costs 1 µs a use."""

    ALLOWED = 1
    BAD_WORDS = 2
    MIN_TOKENS = 4
    BIAS = 8
    PENALTIES = 16
    TRUNCATION = 32
    """Temperature, min-p, top-k or top-p."""
    GRAMMAR = 64
    RESTRICTED = ALLOWED | BAD_WORDS | GRAMMAR
    """What may leave no token at all."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Token-level rules of one request."""

    needs: int
    """Bits of ``Needs``."""
    allowed: Int64
    bad_words: tuple[tuple[int, ...], ...]
    stops: Int64
    """What min_tokens holds back: stop tokens and end-of-sequence, with ignore_eos too (as in vLLM)."""
    biased: Int64
    bias: npt.NDArray[np.float32]

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
    ) -> Rules:
        """Checks the token ids against the vocabulary, and the rules against each other.

        Raises:
            RequestError: a token id outside the vocabulary, or rules that together allow no token.
        """
        allowed = dict.fromkeys(params.allowed_token_ids or ())
        bias = params.logit_bias or {}
        _check_known("allowed_token_ids", allowed, vocab_size)
        _check_known("logit_bias", bias, vocab_size)
        for word in bad_words:
            _check_known("bad_words", word, vocab_size)
        words = tuple(tuple(word) for word in bad_words if word)
        stops = [t for t in dict.fromkeys((*eos_token_ids, *(params.stop_token_ids or ()))) if t < vocab_size]
        banned = {word[0] for word in words if len(word) == 1}
        if params.min_tokens:
            banned.update(stops)
        if banned.issuperset(allowed or range(vocab_size)):
            raise RequestError("bad_words and min_tokens forbid every allowed token; expected at least one left")
        return cls(
            needs=_needs(params, bad_words=bool(words), stops=bool(stops)),
            allowed=np.fromiter(allowed, np.int64, len(allowed)),
            bad_words=words,
            stops=np.asarray(stops, np.int64),
            biased=np.fromiter(bias, np.int64, len(bias)),
            bias=np.fromiter(bias.values(), np.float32, len(bias)),
        )

    @property
    def context(self) -> int:
        """How many of the newest output tokens the bad words can look at."""
        return max((len(word) for word in self.bad_words), default=1) - 1

    def completed_by(self, recent: Sequence[int]) -> Int64:
        """Tokens that would complete a bad word after output that ends with ``recent`` (all of a short one)."""
        return np.asarray([word[-1] for word in self.bad_words if _ends_with(recent, word[:-1])], np.int64)


def _needs(params: SamplingParams, *, bad_words: bool, stops: bool) -> int:
    needs = 0
    if params.allowed_token_ids:
        needs |= Needs.ALLOWED
    if bad_words:
        needs |= Needs.BAD_WORDS
    if params.min_tokens and stops:
        needs |= Needs.MIN_TOKENS
    if params.logit_bias:
        needs |= Needs.BIAS
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        needs |= Needs.PENALTIES
    truncated = params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0
    if not params.greedy and (truncated or params.temperature != 1.0):
        needs |= Needs.TRUNCATION
    return needs


def _check_known(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    unknown = [token for token in tokens if not 0 <= token < vocab_size]
    if unknown:
        raise RequestError(f"{name} holds token {unknown[0]}; expected ids from 0 to {vocab_size - 1}")


def _ends_with(tokens: Sequence[int], end: tuple[int, ...]) -> bool:
    return len(end) <= len(tokens) and tuple(tokens[len(tokens) - len(end) :]) == end


def check_first_token(grammar: Grammar, rules: Rules, params: SamplingParams, vocab_size: int) -> None:
    """Costs one mask, and only where a request has both a grammar and one of the lists.

    A form that empty output has is never refused: its request ends at once.

    Args:
        grammar: ``params.structured_outputs``, compiled.
        rules: of ``params``.
        vocab_size: tokens of the model.

    Raises:
        RequestError: they leave no first token.
    """
    if not rules.needs & (Needs.ALLOWED | Needs.BAD_WORDS):
        return
    first = GrammarState(grammar, rules.stops.tolist(), params.min_tokens).allowed(())
    if first.complete:
        return
    left = np.unpackbits(first.bits.view(np.uint8), bitorder="little")[:vocab_size].astype(np.bool_)
    if rules.needs & Needs.ALLOWED:
        left[np.setdiff1d(np.arange(left.size), rules.allowed)] = False
    banned = rules.completed_by(())
    left[banned[banned < left.size]] = False
    if not left.any():
        lists = [name for name in ("allowed_token_ids", "bad_words") if getattr(params, name)]
        raise RequestError(
            f"structured_outputs and {' and '.join(lists)} together leave no first token; expected at least one"
        )
