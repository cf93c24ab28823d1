"""``/v1/completions``: a prompt is continued as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from .base import Integers, Natural, ReplyModel, Unsupported, extra
from .generation import (
    Copies,
    FinishReason,
    GenerationRequest,
    PerRequestMetrics,
    PromptLogprobs,
    SpeculationReport,
    StopReason,
    Timings,
    TokenId,
    TopLogprobs,
    Usage,
    WrittenToken,
)

MAX_PROMPTS = 1024
MAX_PROMPT_TOKENS = 2**20

TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS), Integers]


def _prompt_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        return "<texts>"
    if isinstance(first, list):
        return "<token lists>"
    return "<tokens>" if isinstance(first, int | float) and not isinstance(first, bool) else None


Prompt = Annotated[
    Annotated[str, Tag("<text>"), Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Tag("<texts>"), Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[TokenIds], Tag("<token lists>"), Field(min_length=1, max_length=MAX_PROMPTS)],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt",
        custom_error_message="Expected text, token ids, or a list of one of them",
    ),
]


class CompletionRequest(GenerationRequest):
    """One prompt, or several, each to be continued ``n`` times."""

    prompt: Prompt = Field(description="Text or token ids, or a list of one of them.")
    max_tokens: Natural | None = Field(16, description="Most output tokens; 0 only with echo; null = 16.")
    echo: bool | None = Field(False, description="The text begins with the prompt.")
    logprobs: TopLogprobs | None = Field(None, description="Report this many most probable tokens at each position.")
    best_of: Copies | None = Field(None, description="Only the same as n.")
    add_special_tokens: bool = Field(True, description="Let the tokenizer add what it adds to prompts, such as a BOS.")

    suffix: Annotated[None, Unsupported("text cannot be inserted before other text here; expected null")] = None
    prompt_embeds: Annotated[None, Unsupported("prompts are text or token ids; expected null")] = None


class CompletionLogprobs(ReplyModel):
    """One entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="Null for the first token of a prompt.")
    top_logprobs: list[dict[str, float] | None] = Field(description="Text → log-probability; the chosen one too.")
    text_offset: list[int] = Field(description="Where each token begins in the choice's text.")


class CompletionChoice(ReplyModel):
    """One continuation, or what is new of it."""

    index: int = Field(description="Prompt's number times n, plus the number among its continuations.")
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = extra("The stop text or stop token that ended it.")
    token_ids: Sequence[int] | None = extra("With return_token_ids.")
    prompt_token_ids: Sequence[int] | None = extra("With return_token_ids; in a stream with the first chunk.")
    prompt_logprobs: PromptLogprobs | None = extra("With prompt_logprobs; in a stream with the first chunk.")
    speculation: SpeculationReport | None = extra("With speculation.metrics; in a stream with the last chunk.")
    token_sources: list[WrittenToken] | None = extra("In a stream, with speculation.metrics 'detailed'.")


class CompletionReply(ReplyModel):
    """A whole answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Unix seconds.")
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: PerRequestMetrics | None = extra("vLLM's, where the server or speculation.metrics asks for it.")
    timings: Timings | None = extra("llama.cpp's, with timings_per_token.")


class CompletionChunk(ReplyModel):
    """An event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = extra("With stream_options.")
    metrics: PerRequestMetrics | None = extra("With the usage; see the whole answer's.")
    timings: Timings | None = extra("llama.cpp's, with timings_per_token: so far.")
