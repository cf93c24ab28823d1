"""What one step works on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dynaspec.contract.proposer import Ints

from .request import Request


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
