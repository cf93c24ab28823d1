"""Acceptance that a head would have: along held-out answers, and on prompts by category."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynaspec.train.run import precision

from .basis import Basis, FrozenTarget
from .conversations import Conversation, Writer
from .head import Batch, TrainedHead, join
from .prompts import Asked
from .states import Shard, shard_path, write_shard

ROWS = 2048  # chains measured at once


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts for chains of ``len(correct)`` drafts; ratios are computed when shown.

    ``correct[j]`` of ``drafted[j]`` chains that had got so far also have draft j right. ``steps`` verifications
    emit ``emitted`` tokens when each takes the accepted drafts and one token of the target's.
    """

    drafted: tuple[int, ...]
    correct: tuple[int, ...]
    steps: int
    emitted: int

    @property
    def length(self) -> float:
        """Tokens a verification emits."""
        return self.emitted / self.steps if self.steps else float("nan")

    @property
    def rates(self) -> list[float]:
        """Share of the drafts at each depth that are accepted once those before them were."""
        return [c / d if d else float("nan") for c, d in zip(self.correct, self.drafted, strict=True)]

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            tuple(a + b for a, b in zip(self.drafted, other.drafted, strict=True)),
            tuple(a + b for a, b in zip(self.correct, other.correct, strict=True)),
            self.steps + other.steps,
            self.emitted + other.emitted,
        )


@torch.no_grad()
def agreement(head: TrainedHead, batch: Batch, depths: int) -> Tensor:
    """[chains, depths] bool: whether each draft is the text's own token, the ones before it being given.

    While those before it were accepted, a draft has the text's own tokens before it; so this gives every
    chain's accepted length exactly.
    """
    equal = torch.zeros(batch.chains, depths, dtype=torch.bool, device=batch.labels.device)
    ids = head.get_buffer("ids")
    for j, depth in enumerate(head.unroll(batch, depths)):
        guess = ids[nn.functional.linear(depth.read, head.output).argmax(-1)]
        equal[depth.chains, j] = guess == batch.labels[depth.chains + j]
    return equal


def walk(equal: Tensor, spans: Iterable[tuple[int, int]]) -> Acceptance:
    """Decode every conversation: draft, take what agrees and one token more, draft again from there."""
    depths = equal.shape[1]
    alive = equal.int().cumprod(dim=1)
    accepted = alive.sum(dim=1).tolist()
    steps = emitted = 0
    for begin, end in spans:
        at = begin
        while at < end:
            steps += 1
            jump = min(accepted[at] + 1, end - at)
            emitted += jump
            at += jump
    before = torch.cat([torch.ones_like(alive[:, :1]), alive[:, :-1]], dim=1)
    return Acceptance(
        tuple(int(before[:, j].sum()) for j in range(depths)),
        tuple(int(alive[:, j].sum()) for j in range(depths)),
        steps,
        emitted,
    )


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
    target: FrozenTarget,
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
