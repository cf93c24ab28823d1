"""From what a caller hands in to requests that the scheduler can run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dynaspec.contract.errors import RequestError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.sampling.grammar import Grammar, GrammarCompiler
from dynaspec.sampling.rules import Rules, check_first_token
from dynaspec.schedule.request import Request

from .tokenizer import Detokenizer, Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``, and ``cache_salt`` if need be."""


_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


@dataclass(slots=True, eq=False)
class Group:
    """A prompt and its ``n`` continuations."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[Request]

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)


class Intake:
    """Checks a prompt and its parameters against the model, and gives every continuation its seed."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...], max_model_len: int, seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._max_model_len = max_model_len
        self._seeds = np.random.default_rng(seed)
        self._grammars = GrammarCompiler(tokenizer.to_json, max(vocab_size, tokenizer.vocab_size), eos_ids)

    def prepare(self, params: SamplingParams) -> None:
        """Compiles what parameters need, so that ``make`` finds it ready; from any thread.

        Raises:
            RequestError: it cannot be compiled.
        """
        self._grammar(params)

    def make(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Group:
        """
        Raises:
            RequestError: a prompt or parameters that the model cannot serve.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is a {type(params).__name__}; expected SamplingParams")
        params = replace(params)  # the caller may change its own
        text, tokens = self._tokens(prompt)
        cache_salt = _cache_salt(prompt)
        if params.truncate_prompt_tokens is not None:
            tokens = tokens[-params.truncate_prompt_tokens :]
        self._check_prompt(tokens)
        bad_words = self._tokenizer.bad_words(params.bad_words or ())
        rules = Rules.of(params, vocab_size=self._vocab_size, eos_token_ids=self._eos_ids, bad_words=bad_words)
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > self._vocab_size:
                raise RequestError(
                    f"{name} is {asked} but the vocabulary has {self._vocab_size} tokens; expected no more"
                )
        grammar = self._grammar(params)
        if grammar is not None:
            check_first_token(grammar, rules, params, self._vocab_size)
        requests = [
            self._request(request_id, i, tokens, params, bad_words, grammar, cache_salt) for i in range(params.n)
        ]
        return Group(request_id, text, tokens, params, requests)

    def _request(
        self,
        request_id: str,
        index: int,
        tokens: list[int],
        params: SamplingParams,
        bad_words: tuple[tuple[int, ...], ...],
        grammar: Grammar | None,
        cache_salt: str,
    ) -> Request:
        wanted = self._max_model_len if params.max_tokens is None else len(tokens) + params.max_tokens
        # Behind the end of its form an output cannot go on.
        eos_ids = () if params.ignore_eos and grammar is None else self._eos_ids
        return Request(
            id=request_id if params.n == 1 else f"{request_id}-{index}",
            prompt=np.asarray(tokens, dtype=np.int32),
            params=params,
            max_length=min(wanted, self._max_model_len),
            seed=int(self._seeds.integers(2**63)) if params.seed is None else params.seed,
            n_index=index,
            stop_ids=frozenset((*eos_ids, *(params.stop_token_ids or ()))),
            eos_ids=self._eos_ids,
            bad_words=bad_words,
            grammar=grammar,
            cache_salt=cache_salt,
            text=Detokenizer(self._tokenizer, params, tokens) if params.detokenize else None,
            arrival_s=time.monotonic(),
        )

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        return None if params.structured_outputs is None else self._grammars.compile(params.structured_outputs)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = sorted(str(key) for key in prompt.keys() - _PROMPT_KEYS if prompt[key] is not None)
            if unknown:
                raise RequestError(
                    f"the prompt has the key {unknown[0]!r}; expected no more than 'prompt' or 'prompt_token_ids', and "
                    "'cache_salt', as the model reads text alone"
                )
            given = [key for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
            if len(given) != 1:
                raise RequestError(
                    f"the prompt has the keys {sorted(prompt)}; expected either 'prompt' or 'prompt_token_ids'"
                )
            prompt = prompt[given[0]]  # type: ignore[assignment]  # checked below like any other
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and all(map(_is_token_id, prompt)):
            return None, [int(t) for t in prompt]
        raise RequestError(
            f"the prompt is a {type(prompt).__name__}; expected text, token ids, or a mapping with one of them"
        )

    def _check_prompt(self, tokens: list[int]) -> None:
        if not tokens:
            raise RequestError("the prompt is empty; expected at least one token")
        if len(tokens) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens but max_model_len is {self._max_model_len}; "
                f"expected at most {self._max_model_len - 1}"
            )
        outside = [token for token in tokens if not 0 <= token < self._vocab_size]
        if outside:
            raise RequestError(f"the prompt holds token id {outside[0]}; expected ids from 0 to {self._vocab_size - 1}")


def _cache_salt(prompt: Prompt) -> str:
    """
    Raises:
        RequestError: it is no text, or empty.
    """
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"cache_salt is {salt!r}; expected a non-empty string")
    return salt or ""


def _is_token_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
