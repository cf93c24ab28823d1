"""What a step's passes gave, before anything of it is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dynaspec.contract.proposer import Ints

from .request import TokenLogprobs


@dataclass(slots=True)
class StepResult:
    """Columns over a batch's decoding requests, and lists over its prefill chunks."""

    drafted: Ints
    """[B] tokens drafted."""
    verified: Ints
    """[B] draft tokens tested."""
    accepted: Ints
    """[B] draft tokens accepted."""
    tokens: npt.NDArray[np.int64]
    """[B, max accepted + 1] accepted tokens, then the target's own."""
    chunk_tokens: list[int | None]
    """For each chunk, the token its last row gave; None where the chunk does not complete its request."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Request id → raw log-probabilities of its tokens of this step."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


@dataclass(slots=True)
class Committed:
    """What ``Scheduler.commit`` took of a result."""

    emitted: Ints
    """[B] tokens that became output; 0 for a request that has left meanwhile."""
