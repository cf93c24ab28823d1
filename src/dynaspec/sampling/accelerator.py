"""The row kernels of ``cpu`` in torch operations, for any device."""

from __future__ import annotations

import torch

from .rng import GOLDEN, MULTIPLIERS, SHIFTS


def hashes(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The first numbers of each stream, see ``rng.nth``, as int64 bit patterns. keys: [R] int64 → [R, count]."""
    index = torch.arange(1, count + 1, device=keys.device)
    state = keys[:, None] + index * _signed(GOLDEN)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        state = (state ^ _shift_right(state, shift)) * _signed(multiplier)
    return state ^ _shift_right(state, SHIFTS[-1])


def exponentials(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Exponential noise [R, count] float64 of the streams ``keys`` [R], never 0 and never infinite."""
    bits = _shift_right(hashes(keys, count), 12)
    return -torch.log((bits.double() + 0.5) * 2.0**-52)


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax of each row [r, V]; zeros for a row that is −inf throughout."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp_().nan_to_num_(0.0)
    return weights.div_(weights.sum(-1, keepdim=True).clamp_min_(1e-30))


def excess(p: torch.Tensor, scale: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """float64 [r] Σ max(scale · p − q, 0) of rows p, q [r, V] with scale [r]."""
    return (p * scale.to(p)[:, None] - q).clamp_min_(0.0).sum(-1, dtype=torch.float64)


def race(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """argmin_i E_i / weights[r, i] for each row [r, V], with the noise of stream keys[r]; int64 [r]."""
    return exponentials(keys, weights.shape[1]).div_(weights).argmin(-1)


def truncate(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Scores [r, V] after temperature, min-p, top-k and top-p, whose parameters [r] mean what they do on CPU."""
    scores = scores / temperature[:, None]
    if bool((min_p > 0).any()):
        limit = scores.amax(-1, keepdim=True).double() + min_p.log()[:, None]
        scores = scores.masked_fill(scores < limit, -torch.inf)
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    dropped = (top_k > 0)[:, None] & (rank >= top_k[:, None])
    weights = (ordered - ordered[:, :1]).double().exp().masked_fill_(dropped, 0.0)
    before = weights.cumsum(-1) - weights
    limit = top_p[:, None] * weights.sum(-1, keepdim=True)
    dropped |= (before >= limit) & (top_p < 1.0)[:, None]
    return scores.scatter(-1, ids, ordered.masked_fill_(dropped, -torch.inf))


def keep_set(scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Scores [r, V] with −inf where bit i % 32 of bits [r, W] int32, at word i // 32, is 0, and behind the last bit."""
    unset = (bits[:, :, None] >> torch.arange(32, device=bits.device, dtype=torch.int32)) & 1 == 0
    missing = max(0, scores.shape[1] - 32 * bits.shape[1])
    unset = torch.nn.functional.pad(unset.flatten(1), (0, missing), value=True)
    return scores.masked_fill(unset[:, : scores.shape[1]], -torch.inf)


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(unsigned: int) -> int:
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned
