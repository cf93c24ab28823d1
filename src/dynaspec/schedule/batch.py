"""What one step works on, and what its passes gave, before anything of it is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dynaspec.contract.proposer import Ints
from dynaspec.sampling.grammar import DeadEnd

from .request import Request, TokenLogprobs


@dataclass(slots=True)
class StepResult:
    """Columns over a batch's decoding requests, and lists over its prefill chunks."""

    drafted: Ints
    """[B] tokens drafted."""
    verified: Ints
    """[B] draft tokens tested."""
    accepted: Ints
    """[B] draft tokens accepted."""
    tokens: Ints
    """[B, most accepted + 1] accepted tokens, then the target's own."""
    chunk_tokens: list[int | None]
    """For each chunk, the token its last row gave; None where the chunk does not complete its request."""
    refused: npt.NDArray[np.bool_] | None = None
    """[B] a grammar refused the first draft token that was not accepted; None = nowhere."""
    verdict: Ints | None = None
    """[B, N] of the nodes of trees: 1 = accepted; −1 = not, but child of the root or of an accepted one; 0 = never
    reached. None for chains."""
    whole: npt.NDArray[np.bool_] | None = None
    """[B] trees whose accepted path ended where nothing more was drafted. None for chains."""
    dead_ends: dict[str, DeadEnd] = field(default_factory=dict)
    """Request id → why no token may follow the accepted ones; its own token in this result is none."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Request id → raw log-probabilities of its tokens of this step."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


@dataclass(slots=True)
class Committed:
    """What ``Scheduler.commit`` took of a result."""

    emitted: Ints
    """[B] tokens that became output; 0 for a request that has left meanwhile."""
    aborted: list[str]
    """Requests, of this batch or not, that were aborted since the commit before."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of a request's tokens that is computed without speculation."""

    request: Request
    lane: int
    start: int
    count: int
    completes: bool
    """The chunk ends with the last committed token, so its last row gives a new one."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that took a lane in this step."""

    request: Request
    lane: int
    cached_blocks: tuple[int, ...]


@dataclass(slots=True)
class StepBatch:
    """Decoding requests in columns, prefill chunks in a list. Satisfies ``contract.proposer.DecodeBatch``."""

    step: int
    requests: tuple[Request, ...]
    """Decoding requests."""
    lanes: Ints
    lengths: Ints
    """[B] committed tokens; upper bounds until the step before has been committed."""
    room: Ints
    """[B] most draft tokens that can still be of use."""
    tokens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    chunks: list[Chunk]
    waiting: int
    admitted: list[Admission] = field(default_factory=list)
    vacated: list[int] = field(default_factory=list)
    """Lanes whose request left since the step before."""
    granted: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[B] draft lengths that KV is reserved for."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Requests for which speculation is off or was cut short, by the reason."""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(request.id for request in self.requests)

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def empty(self) -> bool:
        return not self.requests and not self.chunks
