"""Rows of scores, and operations on them by device: numba on CPU, torch elsewhere.

Row numbers live on the host. Drawn tokens stay where the scores are until ``to_host``, so that on CUDA a drafter's
next pass need not wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from . import accelerator, cpu
from .rng import Int64, UInt64


@dataclass(slots=True)
class Rows:
    """The logits rows of one model pass that are to be sampled from. R rows, B requests, drafts up to K tokens."""

    lanes: Int64
    """[R] lane (persistent table row of a running request) of each logits row."""
    request: Int64
    """[R] index into the first axis of ``drafts``."""
    depth: Int64
    """[R] number of drafted tokens x_1 … x_depth that the row has seen beyond the committed output."""
    drafts: Int64
    """[B, K] drafted tokens, zero-padded."""

    def take(self, index: Int64) -> Rows:
        """Some of the rows, with the same drafts."""
        return Rows(self.lanes[index], self.request[index], self.depth[index], self.drafts)

    def drafted(self, row: int) -> list[int]:
        """x_1 … x_depth of a row."""
        depth = int(self.depth[row])
        return self.drafts[self.request[row], :depth].tolist() if depth else []


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """The largest score of each row [R, V], the lowest id among equals; int64 [R] on the scores' device."""
    if _on_cpu(scores):
        return torch.from_numpy(scores.numpy().argmax(-1))  # ten times faster than torch's
    return scores.argmax(-1)


def softmax(scores: torch.Tensor, index: Int64) -> torch.Tensor:
    """Probabilities of the rows ``index`` [r] of scores [R, V]: a new float32 [r, V]."""
    if not _on_cpu(scores):
        return accelerator.softmax(take(scores, index))
    out = torch.empty(index.size, scores.shape[1])
    cpu.softmax(scores.numpy(), index, out.numpy())
    return out


def probability(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The probability of one token [R] in the softmax of each row [R, V]: float32 [R] on the scores' device."""
    if not _on_cpu(scores):
        return scores.softmax(-1).gather(1, tokens[:, None])[:, 0]
    out = np.empty(scores.shape[0], np.float32)
    cpu.probability(scores.numpy(), tokens.numpy(), out)
    return torch.from_numpy(out)


def leaders(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest score of each row [R, V], all on the scores' device.

    Returns:
        Its token, int64 [R], the lowest id among equals; its probability in the row's softmax, float32 [R]; by how much
        it exceeds the second, float32 [R]: of raw logits that is log(p₁/p₂).
    """
    if not _on_cpu(scores):
        top = scores.topk(2, dim=-1).values
        return scores.argmax(-1), (top[:, 0] - scores.logsumexp(-1)).exp(), top[:, 0] - top[:, 1]
    rows = scores.shape[0]
    tokens, probability, lead = np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows, np.float32)
    cpu.leaders(scores.numpy(), tokens, probability, lead)
    return torch.from_numpy(tokens), torch.from_numpy(probability), torch.from_numpy(lead)


def excess(
    p: torch.Tensor, rows: Int64, scale: npt.NDArray[np.float64], q: torch.Tensor, request: Int64, slot: Int64
) -> npt.NDArray[np.float64]:
    """Σ max(scale · P − Q, 0) over the vocabulary, for P = p[rows] of p [R, V] and Q = q[request, slot] of q [B, K, V].

    Returns:
        [r] on the host.
    """
    if not _on_cpu(p):
        other = q[to_device(request, q), to_device(slot, q)]
        return accelerator.excess(take(p, rows), to_device(scale, p), other).cpu().numpy()
    out = np.empty(rows.size, np.float64)
    cpu.excess(p.numpy(), rows, scale, q.contiguous().numpy(), request, slot, out)
    return out


def top(scores: torch.Tensor, count: int) -> tuple[Int64, npt.NDArray[np.float32]]:
    """The ``count`` largest scores of each row [R, V], in order: tokens, int64 [R, count], and their probabilities in
    the row's softmax, float32 [R, count]. On the host; waits for the device."""
    if not _on_cpu(scores):
        weights, found = scores.softmax(-1).topk(count, dim=-1)
        return found.cpu().numpy(), weights.float().cpu().numpy()
    tokens, probability = np.empty((scores.shape[0], count), np.int64), np.empty((scores.shape[0], count), np.float32)
    cpu.top(scores.numpy(), tokens, probability)
    return tokens, probability


def race(weights: torch.Tensor, keys: UInt64) -> torch.Tensor:
    """One token of each row [r, V], drawn in proportion to its weights with the noise of stream keys[r].

    Returns:
        int64 [r] on the weights' device.
    """
    if not _on_cpu(weights):
        return accelerator.race(weights, to_device(keys.view(np.int64), weights))
    out = np.empty(keys.size, np.int64)
    cpu.race(weights.numpy(), keys, out)
    return torch.from_numpy(out)


def truncate(
    scores: torch.Tensor,
    index: Int64,
    temperature: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float64],
    top_k: Int64,
    top_p: npt.NDArray[np.float64],
) -> None:
    """Temperature, min-p, top-k and top-p of the rows ``index`` [r] of scores [R, V], in place."""
    if _on_cpu(scores):
        cpu.truncate(scores.numpy(), index, temperature, min_p, top_k, top_p)
        return
    columns = (to_device(column, scores) for column in (temperature, min_p, top_k, top_p))
    scores[to_device(index, scores)] = accelerator.truncate(take(scores, index), *columns)


def keep_set(scores: torch.Tensor, index: Int64, bits: npt.NDArray[np.int32]) -> None:
    """Sets what is 0 in bits [r, ⌈V / 32⌉] to −inf in the rows ``index`` [r] of scores [R, V], in place."""
    if _on_cpu(scores):
        cpu.keep_set(scores.numpy(), index, bits)
        return
    where = to_device(index, scores)
    scores[where] = accelerator.keep_set(scores[where], to_device(bits, scores))


def empty(scores: torch.Tensor, index: Int64) -> npt.NDArray[np.bool_]:
    """[r] whether no score of each row ``index`` [r] of scores [R, V] is above −inf."""
    if not _on_cpu(scores):
        return ~(take(scores, index) > -torch.inf).any(-1).cpu().numpy()
    out = np.empty(index.size, np.bool_)
    cpu.empty(scores.numpy(), index, out)
    return out


def take(scores: torch.Tensor, index: Int64) -> torch.Tensor:
    """Rows ``index`` [r] of scores [R, V]; the tensor itself if those are all of its rows in order."""
    if index.size == scores.shape[0] and bool((index == np.arange(index.size)).all()):
        return scores
    return scores[to_device(index, scores)]


def pick(table: torch.Tensor, *index: Int64) -> npt.NDArray[np.float64]:
    """Single entries [r] of a table on the host, given one index column [r] for each of its axes."""
    return table[tuple(to_device(column, table) for column in index)].double().cpu().numpy()


def without(table: torch.Tensor, tokens: Int64) -> torch.Tensor:
    """A copy of a table [r, V] with 0 at ``tokens[r]`` of each row r."""
    return table.scatter(1, to_device(tokens, table)[:, None], 0.0)


def spread(part: torch.Tensor, index: Int64, like: torch.Tensor) -> torch.Tensor:
    """A tensor shaped as ``like`` [R, V] with ``part`` [r, V] in the rows ``index`` and 0 in the others."""
    whole = torch.zeros_like(like)
    whole[to_device(index, like)] = part
    return whole


def to_host(tokens: torch.Tensor) -> Int64:
    """int64 [R] on the host; waits for the device."""
    return tokens.cpu().numpy()


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def to_device(column: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    """A column of numbers where a tensor is."""
    return torch.from_numpy(column).to(like.device)
