"""What a caller gets back. Names and meaning are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Counts and monotonic times (seconds) of one continuation.

    What is said of drafts depends on ``SamplingParams.speculation_metrics``: ``off`` leaves it at 0 and empty,
    ``summary`` gives totals, ``detailed`` fills the tuples too. All of it covers the continuation up to now, whatever
    its output kind.
    """

    arrival_s: float = 0.0
    scheduled_s: float = 0.0
    """When it was scheduled first; 0 while it waits for that."""
    first_token_s: float = 0.0
    finished_s: float = 0.0
    steps: int = 0
    """Decoding steps: target passes that emitted for it, but for the one that completed its prefill."""
    drafts: int = 0
    """Decoding steps with at least one drafted token."""
    drafted: int = 0
    """Tokens drafted."""
    verified: int = 0
    """Drafted tokens that the target tested."""
    accepted: int = 0
    """Drafted tokens that became output."""
    draft_emitted: int = 0
    """Output tokens of steps with a draft, the target's own included."""
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    drafted_per_pos: tuple[int, ...] = ()
    """Detailed: drafts that have a token at each position, from 0."""
    accepted_per_pos: tuple[int, ...] = ()
    """Detailed: drafts whose token at each position was accepted; as long as ``drafted_per_pos``."""
    per_step: tuple[tuple[int, int], ...] = ()
    """Detailed: (drafted, accepted) of every decoding step, in order; (0, 0) for plain ones."""

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens emitted per draft, the target's own included: 1 … k + 1; None without drafts."""
        return self.draft_emitted / self.drafts if self.drafts else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: Sequence[int]
    """A list, as vLLM's; the caller's own."""
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
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0
