"""How many tokens a request has taken."""

from __future__ import annotations

from pydantic import Field

from .base import ReplyModel


class PromptTokensDetails(ReplyModel):
    """Where a prompt's tokens came from."""

    cached_tokens: int = Field(description="Prompt tokens found in the prefix cache.")


class Usage(ReplyModel):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
