"""What is known of one request after it has been answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from .protocol import Usage


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not answered."""

    kind: str
    """Groups failures, such as ``HTTP 400 invalid_request_error`` or ``connection lost``."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request, with times of the client's monotonic clock, in seconds."""

    start_s: float
    """When it was sent."""
    end_s: float
    """When the last event of its continuation came."""
    chunks_s: tuple[float, ...] = ()
    """When each event with tokens came. With speculation an event brings several."""
    text: str = ""
    usage: Usage | None = None
    output_tokens: int = 0
    """The server's count; without one, the tokenizer's, or the number of chunks."""
    streamed: bool = True
    speculation: Mapping[str, Any] | None = None
    failure: Failure | None = None
    queued_s: float = 0.0
    """Seconds it waited in the client for its turn, because of ``--max-concurrency``."""

    @property
    def prompt_tokens(self) -> int:
        """The server's count; 0 where it gives none."""
        return self.usage.prompt_tokens if self.usage is not None else 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token. Of an answer that was not streamed, all of its time."""
        return self.chunks_s[0] - self.start_s

    @property
    def e2el_s(self) -> float:
        """From sending to the last token."""
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens, or if it was not streamed."""
        if self.output_tokens < 2 or not self.streamed:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Times between its chunks."""
        return tuple(after - before for before, after in pairwise(self.chunks_s))

    def counted(self, tokens: int) -> Record:
        """The same with another number of output tokens."""
        return replace(self, output_tokens=tokens)

    def queued(self, seconds: float) -> Record:
        """The same after a wait in the client."""
        return replace(self, queued_s=seconds)
