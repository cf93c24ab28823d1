"""Acceptance of a finished head on prompts of a file, by category."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from dynaspec.train.heads.acceptance import Acceptance, agreement, walk
from dynaspec.train.heads.basis import Basis
from dynaspec.train.heads.batch import Batch, join
from dynaspec.train.heads.cache import Shard, shard_path, write_shard
from dynaspec.train.heads.conversations import Conversation
from dynaspec.train.heads.head import TrainedHead
from dynaspec.train.heads.prompts import Asked
from dynaspec.train.heads.target import Target
from dynaspec.train.heads.writer import Writer
from dynaspec.train.precision import precision

ROWS = 2048  # chains measured at once


def answer_greedily(writer: Writer, asked: Sequence[Asked], new_tokens: int) -> list[Conversation]:
    """The target's greedy answers, without those in which there is nothing to draft."""
    answers = writer.write([a.tokens for a in asked], [0.0] * len(asked), new_tokens)
    return [Conversation(a.tokens, tuple(t), a.source, 0.0) for a, t in zip(asked, answers, strict=True) if len(t) > 1]


def batches(shard: Shard, indices: Iterable[int], device: torch.device) -> list[Batch]:
    """The conversations ``indices`` of ``shard``, joined to batches of about ``ROWS`` chains."""
    groups: list[list[int]] = []
    room = 0
    for i in indices:
        if not groups or shard.chains(i) > room:
            groups.append([])
            room = ROWS
        groups[-1].append(i)
        room -= shard.chains(i)
    return [join([shard.example(i) for i in group]).to(device) for group in groups]


def acceptance(head: TrainedHead, some: Iterable[Batch], depths: int, device: torch.device) -> Acceptance:
    """Acceptance of chains of ``depths`` along the texts of ``some``."""
    total = Acceptance((0,) * depths, (0,) * depths, 0, 0)
    for batch in some:
        with precision(device):
            equal = agreement(head, batch, depths)
        total += walk(equal, batch.chain_spans)
    return total


def by_category(
    head: TrainedHead,
    basis: Basis,
    target: Target,
    conversations: Sequence[Conversation],
    folder: Path,
    depths: int,
    device: torch.device,
) -> dict[str, Any]:
    """Tokens a verification emits, as JSON: ``all`` of ``conversations``, and those of each source.

    ``folder`` receives the states of the texts.
    """
    write_shard(shard_path(folder, 0), conversations, target, basis.shape.aux_layers, basis.vocabulary, basis.scale)
    shard = Shard(shard_path(folder, 0))
    found: dict[str, Any] = {}
    total = Acceptance((0,) * depths, (0,) * depths, 0, 0)
    for source in sorted({c.source for c in conversations}):
        indices = [i for i, c in enumerate(conversations) if c.source == source]
        part = acceptance(head, batches(shard, indices, device), depths, device)
        found[source] = _facts(len(indices), part)
        total += part
    return {"drafts": depths, "all": _facts(len(conversations), total), "categories": found}


def _facts(count: int, measured: Acceptance) -> dict[str, Any]:
    return {
        "conversations": count,
        "acceptance_length": round(measured.length, 4),
        "rates": [round(rate, 4) for rate in measured.rates],
    }
