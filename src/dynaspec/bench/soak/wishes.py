"""Requests at random whose answers are known: each is a function of prompt, parameters and seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from dynaspec.contract.outputs import CompletionOutput, RequestOutput
from dynaspec.contract.sampling_params import SamplingParams

_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "max_tokens", "ignore_eos"),
    *("stop", "logprobs"),
)
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class Wish:
    """One request, greedy or seeded."""

    prompt: tuple[int, ...]
    params: SamplingParams

    def body(self, *, stream: bool) -> dict[str, Any]:
        """The same as the body of a request to ``/v1/completions``, which has the tokens' ids in its answer."""
        given = {name: getattr(self.params, name) for name in _FIELDS}
        told = {name: value for name, value in given.items() if value != _DEFAULTS[name] or name == "max_tokens"}
        return {"prompt": list(self.prompt), "stream": stream, "return_token_ids": True, **told}


def draw_wishes(count: int, *, vocab_size: int, longest_prompt: int, most_tokens: int, seed: int) -> list[Wish]:
    """Wishes of all lengths."""
    dice = random.Random(seed)
    return [_wish(dice, vocab_size, longest_prompt, most_tokens) for _ in range(count)]


def _wish(dice: random.Random, vocab_size: int, longest_prompt: int, most_tokens: int) -> Wish:
    prompt = tuple(dice.randrange(1, vocab_size) for _ in range(dice.randrange(1, longest_prompt + 1)))
    options: dict[str, Any] = {
        "max_tokens": dice.randrange(1, most_tokens + 1),
        "temperature": dice.choice((0.0, 0.7, 1.0)),
        "ignore_eos": dice.random() < 0.5,
        "repetition_penalty": dice.choice((1.0, 1.0, 1.2)),
        "logprobs": dice.choice((None, None, None, 2)),
        "stop": dice.choice((None, None, ("e", "an"))),
    }
    if options["temperature"]:
        options |= {
            "seed": dice.randrange(1000),
            "top_p": dice.choice((1.0, 0.9)),
            "top_k": dice.choice((0, 20)),
            "n": dice.choice((1, 1, 1, 2)),
        }
    return Wish(prompt, SamplingParams(**options))


@dataclass(frozen=True, slots=True)
class Choice:
    """What may be compared of one continuation; while it comes, what there is of it."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    """Of the tokens, if the wish has any."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def begins(self, whole: Choice) -> bool:
        """It may become ``whole``."""
        return (
            whole.token_ids[: len(self.token_ids)] == self.token_ids
            and whole.text.startswith(self.text)
            and whole.logprobs[: len(self.logprobs)] == self.logprobs
        )


Answer = Sequence[Choice]
"""A choice for each continuation."""


def known_answer(output: RequestOutput) -> list[Choice]:
    """What a server must answer where an engine gives this."""
    return [_choice(completion) for completion in output.outputs]


def _choice(completion: CompletionOutput) -> Choice:
    chosen = zip(completion.token_ids, completion.logprobs or (), strict=False)
    return Choice(
        completion.token_ids,
        completion.text,
        tuple(candidates[token].logprob for token, candidates in chosen),
        completion.finish_reason,
        completion.stop_reason,
    )
