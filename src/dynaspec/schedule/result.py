"""What a step's passes gave, before anything of it is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dynaspec.contract.proposer import Ints
from dynaspec.sampling.dead_end import DeadEnd

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
    """[B, most accepted + 1] accepted tokens, then the target's own."""
    chunk_tokens: list[int | None]
    """For each chunk, the token its last row gave; None where the chunk does not complete its request."""
    refused: npt.NDArray[np.bool_] | None = None
    """[B] a grammar refused the first draft token that was not accepted; None = nowhere."""
    verdict: npt.NDArray[np.int64] | None = None
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
