"""Drawing one token from each row of processed scores."""

from __future__ import annotations

import numpy as np
import torch

from . import ops
from .rng import Purpose
from .rows import Rows
from .state import SamplerState


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
        rows: what the rows are
        state: the requests' parameters
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
