"""Cross-entropy against the target's own distribution, over the draft vocabulary.

The logits are the largest thing in a step. Their gradient is formed in the forward pass, in place, and
both products with it are taken there; the backward pass only scales them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dynaspec.train.eagle3.batch import Batch
from dynaspec.train.eagle3.head import Head
from dynaspec.train.eagle3.unroll import Depth, unroll

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
    """[chains, draft_vocab]: the target's distribution for each label, renormalised over the draft vocabulary."""
    scores = batch.last.to(target_head.dtype) @ target_head.T
    if temperature != 1.0:
        scores /= temperature
    return torch.softmax(scores, dim=-1)


def loss_of(
    head: Head, target_head: Tensor, batch: Batch, settings: LossSettings, chains: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Loss of ``batch`` as its part of a step of ``chains`` chains, and sums for the log.

    A row counts as much as the target's probability inside the draft vocabulary: what the head can never
    draft teaches it little.

    Returns:
        The scalar to differentiate, and float64 [depths, 2]: sampled cross-entropy in nats and rows sampled.
    """
    truth = labels(batch, target_head, settings.temperature)
    if settings.noise:
        generator = torch.Generator(batch.aux.device).manual_seed(seed)
        noise = torch.randn(batch.aux.shape, generator=generator, device=batch.aux.device, dtype=batch.aux.dtype)
        batch = replace(batch, aux=batch.aux + settings.noise * noise)
    outputs = list(unroll(head, batch, settings.depths, settings.chain_share, seed))
    index = torch.cat([depth.chains + j for j, depth in enumerate(outputs)])
    weights = torch.cat([_weights(batch, depth, j, settings, chains) for j, depth in enumerate(outputs)])
    normed = torch.cat([depth.normed for depth in outputs])
    counts = [len(depth.chains) for depth in outputs]
    watched = _watched(counts, normed.device)
    loss: Tensor
    loss, losses = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        normed, head.lm_head.weight, truth, index, weights, watched
    )
    return loss, _sums(losses, counts, settings.depths)


def _weights(batch: Batch, depth: Depth, j: int, settings: LossSettings, chains: int) -> Tensor:
    kept = settings.chain_share if j else 1.0
    return batch.mass[depth.chains + j] * (settings.depth_decay**j / (kept * chains))


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
    """Σ weights · CE(truth[index], softmax(normed · weightᵀ)), and CE of the watched rows in nats, without a gradient.

    The sum's value is estimated from the watched rows; its gradients are those of all rows.
    """

    @staticmethod
    def forward(
        ctx: Any, normed: Tensor, weight: Tensor, truth: Tensor, index: Tensor, weights: Tensor, watched: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``normed`` [rows, hidden], ``weight`` [draft_vocab, hidden], ``truth`` [labels, draft_vocab], ``index`` and
        ``weights`` [rows], ``watched`` [few] row numbers; products in the dtype of ``truth``."""
        x, w = normed.to(truth.dtype), weight.to(truth.dtype)
        scores = x @ w.T
        wanted = truth[index[watched]].float()
        losses = -(wanted * torch.log_softmax(scores[watched].float(), dim=-1)).sum(-1)
        for begin in range(0, len(x), CHUNK):  # a chunk stays in the cache
            some = slice(begin, begin + CHUNK)
            guess = torch.softmax(scores[some], dim=-1)
            guess -= truth.index_select(0, index[some])
            torch.mul(guess, weights[some, None].to(truth.dtype), out=scores[some])
        # Transposed first, the second product is nearly twice as fast on a CPU.
        ctx.save_for_backward(scores @ w, (x.T.contiguous() @ scores).T)
        ctx.dtypes = normed.dtype, weight.dtype
        ctx.mark_non_differentiable(losses)
        return losses.mean() * weights.sum(), losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``normed`` and ``weight``."""
        by_normed, by_weight = ctx.saved_tensors
        first, second = ctx.dtypes
        by_normed.mul_(upstream)
        by_weight.mul_(upstream)
        return by_normed.to(first), by_weight.to(second), None, None, None, None
