"""How many drafts would be accepted, on texts that training never saw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynaspec.train.heads.batch import Batch
from dynaspec.train.heads.head import TrainedHead


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
