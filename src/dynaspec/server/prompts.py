"""From texts to token ids, without holding up other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dynaspec.api import AsyncLLM
from dynaspec.contract.errors import RequestError
from dynaspec.contract.sampling_params import SamplingParams

from .errors import ApiError, bad_request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """What a request is run with."""

    tokens: Sequence[int]
    text: str | None = None
    """As it was given; None if token ids were."""


async def encode_text(llm: AsyncLLM, text: str, *, special_tokens: bool, truncated: bool, param: str) -> EncodedPrompt:
    """
    Args:
        special_tokens: whether the tokenizer adds what it adds to prompts.
        truncated: whether only the end of it will be used, so that it may be long.
        param: the request's field that it comes from.

    Raises:
        ApiError: no valid Unicode; or so long that it must have too many tokens, which is seen without encoding it.
    """
    longest = llm.tokenizer.longest_token
    if longest is not None and not truncated and len(text) > longest * llm.max_model_len:
        least = -(-len(text) // longest)
        raise context_length_exceeded(f"at least {least}", llm.max_model_len, param=param)
    tokens = await in_thread(lambda: llm.tokenizer.encode(text, special_tokens=special_tokens), param=param)
    return EncodedPrompt(tokens, text)


async def in_thread(work: Callable[[], T], *, param: str) -> T:
    """Runs what takes time and may be refused.

    Raises:
        ApiError: 400, for a ``RequestError``.
    """
    try:
        return await asyncio.to_thread(work)
    except RequestError as error:
        raise bad_request(str(error), param=param) from None


def check_length(prompt: EncodedPrompt, params: SamplingParams, limit: int, *, asked: int | None, param: str) -> None:
    """
    Args:
        limit: most tokens of prompt and output.
        asked: output tokens that the caller has asked for; None = what fits.

    Raises:
        ApiError: they do not fit.
    """
    length = min(len(prompt.tokens), params.truncate_prompt_tokens or len(prompt.tokens))
    if length >= limit:
        raise context_length_exceeded(str(length), limit, param=param)
    if asked is not None and length + asked > limit:
        raise bad_request(
            f"the prompt's tokens are {length} and max_tokens is {asked}, but the model takes {limit} in all; "
            f"expected max_tokens of at most {limit - length}",
            param="max_tokens",
            code="context_length_exceeded",
        )


def context_length_exceeded(length: str, limit: int, *, param: str) -> ApiError:
    """400: not even one token could be generated."""
    return bad_request(
        f"the prompt has {length} tokens, but the model takes {limit} in all; expected at most {limit - 1}",
        param=param,
        code="context_length_exceeded",
    )
