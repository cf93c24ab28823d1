"""What requests may say of their drafts, and what answers say of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dynaspec.contract.sampling_params import SpeculationMetrics

from .base import ReplyModel, RequestModel, Whole, extra

TokenSource = Literal["draft", "target"]
"""Who wrote a token: the drafter, with the target's consent, or the target itself."""

DraftLength = Annotated[int, Field(ge=0, le=1024), Whole]


class SpeculationOptions(RequestModel):
    """A request's wishes about its drafts. None of them changes what is generated, only how fast."""

    max_draft_tokens: DraftLength | None = Field(None, description="Most tokens drafted at once; 0 = no speculation.")
    expected_acceptance: float | None = Field(
        None, ge=0, le=1, description="Share of drafted tokens expected to be accepted: where a learning policy starts."
    )
    metrics: SpeculationMetrics | None = Field(
        None,
        description="What the answer says of the drafts: nothing, totals, or also counts by position and by step and, "
        "in streams, who wrote each token.",
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
    source: TokenSource = Field(description="Who wrote it.")
