"""What answers say of tokens, drafts and times; what requests may say of their drafts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dynaspec.contract.sampling_params import SpeculationMetrics

from .base import ReplyModel, RequestModel, Whole, extra


class PromptTokensDetails(ReplyModel):
    """Where a prompt's tokens came from."""

    cached_tokens: int = Field(description="Prompt tokens found in the prefix cache.")


class Usage(ReplyModel):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


TokenSource = Literal["draft", "target"]
"""Where a token comes from: a draft that the target accepted, or the target itself."""

DraftLength = Annotated[int, Field(ge=0, le=1024), Whole]


class SpeculationOptions(RequestModel):
    """What a request asks for about its drafts. None of it changes what is generated, only how fast."""

    max_draft_tokens: DraftLength | None = Field(None, description="Most tokens drafted at once; 0 = no speculation.")
    expected_acceptance: float | None = Field(
        None, ge=0, le=1, description="Share of drafted tokens expected to be accepted: where a learning policy starts."
    )
    metrics: SpeculationMetrics | None = Field(
        None,
        description="What the answer says of the drafts: nothing, totals, or also counts by position and by step and, "
        "in streams, the source of each token.",
    )


class SpeculationReport(ReplyModel):
    """What became of one choice's drafts."""

    steps: int = Field(description="Target passes that gave tokens, but for the one that completed the prompt.")
    drafts: int = Field(description="Steps with at least one drafted token.")
    drafted: int = Field(description="Tokens drafted.")
    verified: int = Field(description="Drafted tokens that the target tested.")
    accepted: int = Field(description="Drafted tokens that became output.")
    mean_acceptance_length: float | None = Field(
        description="Tokens that a draft led to, the target's own included; null without drafts."
    )
    draft_acceptance_rate: float | None = Field(description="Accepted / drafted; null without drafts.")
    drafted_per_pos: tuple[int, ...] | None = extra("Drafts that have a token at each position, from 0.")
    accepted_per_pos: tuple[int, ...] | None = extra("Drafts whose token at each position was accepted.")
    per_step: tuple[tuple[int, int], ...] | None = extra(
        "(drafted, accepted) of every step in order; (0, 0) for plain ones."
    )


class WrittenToken(ReplyModel):
    """A token of a delta."""

    text: str = Field(description="The text that it added; empty for special tokens and parts of a character.")
    source: TokenSource = Field(description="Where it comes from.")


class SpeculativeDecodingMetrics(ReplyModel):
    """What became of the drafts of the one continuation. Names and meaning are vLLM's."""

    mean_acceptance_length: float = Field(description="1 + num_accepted_draft_tokens / num_spec_steps.")
    draft_acceptance_rate: float = Field(description="num_accepted_draft_tokens / num_draft_tokens.")
    acceptance_histogram: list[int] = Field(description="Steps that accepted 0, 1, 2, … draft tokens.")
    num_spec_steps: int = Field(description="Steps with at least one drafted token.")
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int = Field(description="The longest draft that is configured.")
    per_step_accepted: list[int] | None = extra("Detailed: accepted tokens of each of these steps.")
    per_step_drafted: list[int] | None = extra("Detailed: drafted tokens of each of these steps.")


class PerRequestMetrics(ReplyModel):
    """Of a request with one continuation. Names and meaning are vLLM's."""

    time_to_first_token_ms: float | None = extra("From being scheduled to the first token.")
    generation_time_ms: float | None = extra("From the first token to the last.")
    queue_time_ms: float | None = extra("From arrival to being scheduled.")
    mean_itl_ms: float | None = extra("Mean time between two tokens; not for a single one.")
    tokens_per_second: float | None = extra("Output tokens by the time from being scheduled to the end.")
    speculative_decoding: SpeculativeDecodingMetrics | None = extra("If the engine speculates.")


class Timings(ReplyModel):
    """Of a request with one continuation, up to now. Names and meaning are those of llama.cpp's server."""

    cache_n: int = Field(description="Prompt tokens found in the prefix cache.")
    prompt_n: int = Field(description="Prompt tokens computed.")
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int = Field(description="Output tokens.")
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | None = extra("Tokens drafted; only if there were drafts.")
    draft_n_accepted: int | None = extra("Of these, accepted.")
