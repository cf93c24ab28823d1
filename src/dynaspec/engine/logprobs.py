"""Log-probabilities of output and prompt tokens, from the target's raw logits."""

from __future__ import annotations

import numpy as np
import torch

from dynaspec.contract.proposer import Ints
from dynaspec.model.base import Model
from dynaspec.sampling.draw import logprobs
from dynaspec.schedule.batch import Chunk, StepBatch, StepResult
from dynaspec.schedule.request import TokenLogprobs

from .layout import PassLayout


def collect_logprobs(
    batch: StepBatch,
    layout: PassLayout,
    model: Model,
    hidden: torch.Tensor,
    logits: torch.Tensor | None,
    result: StepResult,
    path: Ints | None = None,
) -> None:
    """Adds to ``result`` what requests asked for; costs nothing when nobody did.

    Args:
        hidden: [rows of the pass, hidden]
        logits: [sampled rows, V] raw; None if the pass has no sampled rows.
        path: [B, depth] accepted nodes, where drafts are trees.
    """
    if logits is not None:
        _collect_output(batch, layout, logits, result, path)
    for c, chunk in enumerate(batch.chunks):
        if chunk.request.params.prompt_logprobs is not None:
            first = int(layout.rows.query_start[len(batch.requests) + c])
            _collect_prompt(chunk, model, hidden[first : first + chunk.count], result)


def _collect_output(
    batch: StepBatch, layout: PassLayout, logits: torch.Tensor, result: StepResult, path: Ints | None
) -> None:
    starts = layout.rows.query_start
    for i, request in enumerate(batch.requests):
        if request.params.logprobs is not None:
            emitted = result.tokens[i, : result.accepted[i] + 1]
            drafted = np.arange(len(emitted) - 1) if path is None else path[i, : len(emitted) - 1]
            rows = logits[torch.from_numpy(int(starts[i]) + np.append(0, 1 + drafted)).to(logits.device)]
            result.logprobs[request.id] = _entries(rows, emitted, request.params.logprobs)
    row = layout.decode_rows
    for chunk, token in zip(batch.chunks, result.chunk_tokens, strict=True):
        if token is None:
            continue
        if chunk.request.params.logprobs is not None:
            rows, tokens = logits[row : row + 1], np.array([token])
            result.logprobs[chunk.request.id] = _entries(rows, tokens, chunk.request.params.logprobs)
        row += 1


def _collect_prompt(chunk: Chunk, model: Model, hidden: torch.Tensor, result: StepResult) -> None:
    """Row p gives the log-probability of prompt token p + 1; rows known from before a preemption are left out."""
    request = chunk.request
    first = max(chunk.start, len(request.prompt_logprobs))
    last = min(chunk.start + chunk.count, len(request.prompt) - 1)
    if first < last and request.params.prompt_logprobs is not None:
        logits = model.logits(hidden[first - chunk.start : last - chunk.start])
        tokens = request.prompt[first + 1 : last + 1].astype(np.int64)
        result.prompt_logprobs[request.id] = _entries(logits, tokens, request.params.prompt_logprobs)


def _entries(logits: torch.Tensor, tokens: Ints, top_n: int) -> list[TokenLogprobs]:
    columns = logprobs(logits, tokens, top_n)
    per_position = zip(
        tokens.tolist(),
        columns.chosen.tolist(),
        columns.chosen_rank.tolist(),
        columns.top_tokens.tolist(),
        columns.top.tolist(),
        strict=True,
    )
    return [TokenLogprobs(t, p, r, tuple(ids), tuple(top)) for t, p, r, ids, top in per_position]
