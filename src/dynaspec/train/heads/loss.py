"""Cross-entropy against the target's own distribution, over what a head can draft.

The logits are the largest thing in a step. Their gradient is formed in the forward pass, in place, and
both products with it are taken there; the backward pass only scales them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .head import Batch, Depth, TrainedHead

SAMPLED_ROWS = 8  # rows of a depth whose loss is computed for the log
CHUNK = 256


@dataclass(frozen=True, slots=True)
class LossSettings:
    """``depths`` unrolled steps, the j-th weighing ``depth_decay`` ** j; ``chain_share`` of the chains go beyond the
    first. ``temperature`` is the target's in its labels. ``noise`` is added to the hidden states in training, as a
    share of their own size: without it a head soon knows its texts by heart.
    """

    depths: int = 5
    depth_decay: float = 0.8
    chain_share: float = 0.5
    temperature: float = 1.0
    noise: float = 0.1


@torch.no_grad()
def labels(batch: Batch, target_head: Tensor, temperature: float) -> Tensor:
    """[chains, vocabulary]: the target's distribution for each label, renormalised over what the head can draft.

    ``target_head`` [vocabulary, hidden] are the target's output rows of that.
    """
    scores = batch.last.to(target_head.dtype) @ target_head.T
    if temperature != 1.0:
        scores /= temperature
    return torch.softmax(scores, dim=-1)


def loss_of(
    head: TrainedHead, target_head: Tensor, batch: Batch, settings: LossSettings, chains: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Loss of ``batch`` as its part of a step of ``chains`` chains, and sums for the log.

    A row counts as much as the target's probability of what the head can draft: the rest teaches it little.

    Returns:
        The scalar to differentiate, and float64 [depths, 2]: sampled cross-entropy in nats and rows sampled.
    """
    truth = labels(batch, target_head, settings.temperature)
    if settings.noise:
        generator = torch.Generator(batch.aux.device).manual_seed(seed)
        noise = torch.randn(batch.aux.shape, generator=generator, device=batch.aux.device, dtype=batch.aux.dtype)
        batch = replace(batch, aux=batch.aux + settings.noise * noise)
    outputs = list(head.unroll(batch, settings.depths, settings.chain_share, seed))
    index = torch.cat([depth.chains + j for j, depth in enumerate(outputs)])
    mass = batch.mass if head.partial else torch.ones_like(batch.mass)
    weights = torch.cat([_weights(mass, depth, j, settings, chains) for j, depth in enumerate(outputs)])
    read = torch.cat([depth.read for depth in outputs])
    counts = [len(depth.chains) for depth in outputs]
    watched = _watched(counts, read.device)
    loss: Tensor
    loss, losses = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        read, head.output, truth, index, weights, watched
    )
    extra = head.extra_loss(read, batch.last[index])
    if extra is not None:
        loss = loss + (extra * weights).sum()
    return loss, _sums(losses, counts, settings.depths)


def _weights(mass: Tensor, depth: Depth, j: int, settings: LossSettings, chains: int) -> Tensor:
    kept = settings.chain_share if j else 1.0
    return mass[depth.chains + j] * (settings.depth_decay**j / (kept * chains))


def _watched(counts: Sequence[int], device: torch.device) -> Tensor:
    """Rows whose loss is computed: the first few of each depth."""
    begins = [sum(counts[:j]) for j in range(len(counts))]
    rows = [torch.arange(b, b + min(n, SAMPLED_ROWS), device=device) for b, n in zip(begins, counts, strict=True)]
    return torch.cat(rows)


def _sums(losses: Tensor, counts: Sequence[int], depths: int) -> Tensor:
    sums = torch.zeros(depths, 2, dtype=torch.float64)
    watched = [min(n, SAMPLED_ROWS) for n in counts]
    for j, part in enumerate(losses.split_with_sizes(watched)):
        sums[j, 0], sums[j, 1] = float(part.sum()), len(part)
    return sums


class SoftCrossEntropy(torch.autograd.Function):
    """Σ weights · CE(truth[index], softmax(read · weightᵀ)), and CE of the watched rows in nats, without a gradient.

    The sum's value is estimated from the watched rows; its gradients are those of all rows.
    """

    @staticmethod
    def forward(
        ctx: Any, read: Tensor, weight: Tensor, truth: Tensor, index: Tensor, weights: Tensor, watched: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``read`` [rows, width], ``weight`` [vocabulary, width], ``truth`` [labels, vocabulary], ``index`` and
        ``weights`` [rows], ``watched`` [few] row numbers; products in the dtype of ``truth``."""
        x, w = read.to(truth.dtype), weight.to(truth.dtype)
        scores = x @ w.T
        wanted = truth[index[watched]].float()
        losses = -(wanted * torch.log_softmax(scores[watched].float(), dim=-1)).sum(-1)
        for begin in range(0, len(x), CHUNK):  # a chunk stays in the cache
            some = slice(begin, begin + CHUNK)
            guess = torch.softmax(scores[some], dim=-1)
            guess -= truth.index_select(0, index[some])
            torch.mul(guess, weights[some, None].to(truth.dtype), out=scores[some])
        # Transposed first, the second product is nearly twice as fast on a CPU.
        by_weight = (x.T.contiguous() @ scores).T if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(scores @ w, by_weight)
        ctx.dtypes = read.dtype, weight.dtype
        ctx.mark_non_differentiable(losses)
        return losses.mean() * weights.sum(), losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``read``, and of ``weight`` unless it is frozen."""
        by_read, by_weight = ctx.saved_tensors
        first, second = ctx.dtypes
        by_read.mul_(upstream)
        if by_weight is not None:
            by_weight = by_weight.mul_(upstream).to(second)
        return by_read.to(first), by_weight, None, None, None, None
