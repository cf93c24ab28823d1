"""Prompts cut to what the server has room for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynaspec.contract.errors import ConfigError

from .protocol import Prompt
from .requests import Asked
from .tokens import Tokens

_CHAT_ROOM = 64
"""Tokens left for what a chat template adds, and for text that becomes a few more tokens once it is cut."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Requests that the server can take."""

    requests: tuple[Asked, ...]
    cut: int = 0
    """How many prompts lost their beginning."""
    unchecked: bool = False
    """Their lengths are unknown: there is no tokenizer, or the server does not say what it has room for."""


async def fit_requests(
    requests: Sequence[Asked], tokens: Tokens | None, max_model_len: int | None, *, is_chat: bool
) -> Fitted:
    """Cuts prompts that leave too little room for their answers, from the left; a chat's prompts become text.

    Raises:
        ConfigError: an answer alone is as long as the model.
        ServerError: the server's tokenizer refuses.
    """
    if tokens is None:
        return Fitted(tuple(requests), unchecked=True)
    encoded = await _encoded(requests, tokens) if max_model_len is not None else {}
    fitted = []
    cut = 0
    for asked in requests:
        ids = asked.prompt if isinstance(asked.prompt, tuple) else encoded.get(asked.prompt, ())
        room = _room(max_model_len, asked.output_len, is_chat)
        prompt: Prompt = asked.prompt
        if room is not None and len(ids) > room:
            prompt = ids[-room:]
            cut += 1
        if is_chat and isinstance(prompt, tuple):
            prompt = await tokens.decode(prompt)
        fitted.append(replace(asked, prompt=prompt))
    return Fitted(tuple(fitted), cut, unchecked=max_model_len is None)


async def _encoded(requests: Sequence[Asked], tokens: Tokens) -> dict[str, tuple[int, ...]]:
    """Tokens of every text, each encoded once."""
    texts = sorted({asked.prompt for asked in requests if isinstance(asked.prompt, str)})
    several = await asyncio.gather(*(tokens.encode(text) for text in texts))
    return {text: tuple(ids) for text, ids in zip(texts, several, strict=True)}


def _room(max_model_len: int | None, output_len: int, is_chat: bool) -> int | None:
    if max_model_len is None:
        return None
    room = max_model_len - output_len - (_CHAT_ROOM if is_chat else 0)
    if room < 1:
        raise ConfigError(
            f"answers of {output_len} tokens leave no room for a prompt in the model's {max_model_len}; "
            "expected a shorter --output-len"
        )
    return room
