"""Prompts, where vLLM's scripts import them from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt's text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Prompts with different ones share neither prefix cache nor texts to draft from."""


class TokensPrompt(TypedDict):
    """A prompt's token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]
    """See ``TextPrompt``."""
