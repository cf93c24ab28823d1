"""Log-probabilities that are reported to the caller: of the target's unprocessed logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .rng import Int64

Float32 = npt.NDArray[np.float32]


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
