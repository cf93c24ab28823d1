"""What a caller gets back. Names and meaning are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural log-probability under the target's unprocessed distribution."""

    logprob: float
    rank: int
    """1 = the most probable token."""
    decoded_token: str | None = None


Logprobs = tuple[Mapping[int, Logprob], ...]
"""One mapping (token id → Logprob) a position."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Counts and monotonic times (seconds) of one continuation."""

    arrival_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    steps: int = 0
    """Target passes that emitted for it."""
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or string that ended it; None for end-of-sequence and length."""
    metrics: RequestMetrics = RequestMetrics()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All continuations of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0
