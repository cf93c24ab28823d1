"""What answers say of their own making, in vLLM's form (``metrics``) and in llama.cpp's (``timings``)."""

from __future__ import annotations

from pydantic import Field

from .base import ReplyModel, extra


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
