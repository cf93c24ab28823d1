"""What the fault tests drive engines with: many requests at random, whose callers behave at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dynaspec import SamplingParams
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind
from soak_callers import Wish

from .engines import PlainDecoding

Fate = Literal["finish", "leave", "abort", "cancel"]
"""It is read to its end; its reader stops reading; somebody aborts it; its reader's task is cancelled."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A wish, and how its caller behaves."""

    wish: int
    kind: RequestOutputKind
    fate: Fate
    delay_s: float
    """Before it comes."""
    patience: float
    """When its fate strikes: seconds, or outputs in hundredths, since it came."""


def draw_visits(count: int, wishes: int, *, within_s: float, seed: int) -> list[Visit]:
    """Of every five callers, two read to the end."""
    dice = random.Random(seed)
    fates: tuple[Fate, ...] = ("finish", "finish", "leave", "abort", "cancel")
    return [
        Visit(
            wish=dice.randrange(wishes),
            kind=dice.choice(list(RequestOutputKind)),
            fate=dice.choice(fates),
            delay_s=dice.random() * within_s,
            patience=dice.random() ** 2 / 10,
        )
        for _ in range(count)
    ]


def single_runs(plain: PlainDecoding, wishes: Sequence[Wish]) -> list[RequestOutput]:
    """What each wish gets when nobody else is there."""
    return [plain.llm.generate([wish.prompt], wish.params)[0] for wish in wishes]


def with_kind(params: SamplingParams, kind: RequestOutputKind) -> SamplingParams:
    return replace(params, output_kind=kind)
