"""Drawing one token from each row of processed scores, and the log-probabilities that callers ask for.

Those are of the target's unprocessed logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from . import ops
from .ops import Rows
from .rng import Int64, Purpose
from .state import SamplerState

Float32 = npt.NDArray[np.float32]


def draw(
    scores: torch.Tensor, rows: Rows, state: SamplerState, purpose: Purpose
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draws a token from every row.

    * Greedy requests: the largest score, the lowest id among equals.
    * Others: argmin_i E_i / p_i with p = softmax(scores) and exponential noise E, which draws from p exactly
      (the Gumbel-max trick, e.g. Maddison et al., 1411.0030). A request with a seed uses the noise of the output
      position whatever the purpose: coupled sampling, where a drafter's and the target's tokens tend to agree.

    A row whose scores are all −inf draws token 0.

    Args:
        scores: [R, V] from ``SamplerState.process``
        purpose: TARGET for tokens to be committed, DRAFT for tokens to be verified

    Returns:
        tokens [R] int64 on the scores' device, and the very distributions q [R, V] float32 that drafts were drawn
        from. q is given only for DRAFT and only if some request needs it (neither greedy nor seeded); the rows of
        others are 0.
    """
    greedy = state.greedy[rows.lanes]
    sampled = np.flatnonzero(~greedy)
    if not sampled.size:
        return ops.argmax(scores), None
    weights = ops.softmax(scores, sampled)
    drawn = ops.race(weights, state.keys(rows, sampled, purpose))
    wants_q = purpose is Purpose.DRAFT and not state.seeded[rows.lanes[sampled]].all()
    if sampled.size == rows.lanes.size:
        return drawn, weights if wants_q else None
    tokens = ops.argmax(scores)
    tokens[torch.from_numpy(sampled).to(tokens.device)] = drawn
    return tokens, ops.spread(weights, sampled, scores) if wants_q else None


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Natural log-probabilities at r positions."""

    chosen: Float32
    """[r] of the tokens asked about."""
    chosen_rank: Int64
    """[r] 1 + the number of strictly more probable tokens."""
    top_tokens: Int64
    """[r, n] the most probable tokens, equal ones by id."""
    top: Float32
    """[r, n]"""


def logprobs(logits: torch.Tensor, chosen: Int64, top_n: int) -> LogprobColumns:
    """Log-probabilities of chosen tokens and of the ``top_n`` most probable ones.

    Args:
        logits: [r, V] float32 raw logits, one row a position
        chosen: [r] token at each position
        top_n: how many; −1 = the whole vocabulary
    """
    values = torch.log_softmax(logits, -1)
    picked = values.gather(1, torch.from_numpy(chosen).to(logits.device)[:, None])
    rank = (values > picked).sum(-1) + 1
    vocab = logits.shape[1]
    top, tokens = _top(values, vocab if top_n < 0 else min(top_n, vocab))
    return LogprobColumns(picked[:, 0].cpu().numpy(), rank.cpu().numpy(), tokens, top)


def _top(values: torch.Tensor, count: int) -> tuple[Float32, Int64]:
    parts = values.topk(count, dim=-1)
    top: Float32 = parts.values.cpu().numpy()
    tokens: Int64 = parts.indices.cpu().numpy()
    order = np.lexsort((tokens, -top), axis=-1)
    return np.take_along_axis(top, order, -1), np.take_along_axis(tokens, order, -1)
