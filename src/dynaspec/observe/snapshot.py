"""What an engine is doing at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from dynaspec.contract.proposer import KeptText

from .counts import SpecCounts
from .meters import RequestMeter, RequestTotals, StepMeter, StepTotals


class LiveRequest(NamedTuple):
    """One continuation that has not ended. A tuple, as a frozen dataclass takes four times as long to make."""

    id: str
    state: Literal["running", "waiting"]
    prompt_tokens: int
    output_tokens: int
    drafted: int
    """Tokens drafted for it since it arrived; 0 if its caller wants no draft metrics."""
    accepted: int
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Totals since the engine was built, and what is there now. Plain values, taken between two steps."""

    counts: SpecCounts
    running: int
    waiting: int
    kv_blocks: int
    """Blocks of the KV cache."""
    kv_blocks_used: int
    """Blocks that running requests hold."""
    policy: str
    """Name of the policy; ``none`` without speculation."""
    longest_draft: int = 0
    """Most tokens that the policy may draft at once."""
    prefix_cache_queries: int = 0
    """Tokens of requests that were looked up in the prefix cache when they were seated first."""
    prefix_cache_hits: int = 0
    """Of these, tokens whose KV was there."""
    totals: RequestTotals = field(default_factory=lambda: RequestMeter().snapshot())
    steps: StepTotals = field(default_factory=lambda: StepMeter().snapshot())
    estimates: Mapping[str, Any] = field(default_factory=dict)
    """What the controller believes: see ``contract.step.Explains``. Empty if it does not say."""
    proposers: Mapping[str, bool] = field(default_factory=dict)
    """Configured proposers, and whether each is still switched on."""
    kept_text: KeptText | None = None
    """What suffix trees hold; None = there are none."""
    requests: tuple[LiveRequest, ...] = ()
    """In order of arrival."""
