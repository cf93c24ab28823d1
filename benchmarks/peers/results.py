"""What was measured: speeds by side and load, who failed, whose answers agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

START = 12
"""Tokens at the beginning of an answer that are its start."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One side's workload, once: every prompt answered with one token, and answered whole."""

    prompts: int
    prompt_tokens: int
    tokens: int
    """Of all answers."""
    prefill_s: float
    """What one token each takes."""
    total_s: float

    @property
    def prefill(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_s

    @property
    def decoding(self) -> float:
        """Tokens per second after each answer's first: what whole answers take beyond one token each. Infinite where
        that is lost in the noise."""
        beyond = self.total_s - self.prefill_s
        return (self.tokens - self.prompts) / beyond if beyond > 0 else float("inf")

    @property
    def total(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.total_s


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many of a side's answers are the reference's."""

    same: int
    same_start: int
    prompts: int


@dataclass(slots=True)
class Results:
    """By side (peer, variant)."""

    order: Sequence[tuple[str, str]]
    """Every side that was asked for."""
    loads: Sequence[int]
    turns: dict[tuple[str, str], dict[int, list[Turn]]] = field(default_factory=dict)
    failures: dict[tuple[str, str], dict[int | None, str]] = field(default_factory=dict)
    """Load → reason; None = all loads."""
    agreement: dict[tuple[str, str], Agreement] = field(default_factory=dict)
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """By peer."""

    def add(self, side: tuple[str, str], load: int, turn: Turn) -> None:
        self.turns.setdefault(side, {}).setdefault(load, []).append(turn)

    def fail(self, side: tuple[str, str], load: int | None, reason: str) -> None:
        self.failures.setdefault(side, {})[load] = reason

    def failure(self, side: tuple[str, str], load: int) -> str | None:
        """Why a side has no figure at a load; None if nothing is in its way."""
        of_side = self.failures.get(side, {})
        return of_side.get(load, of_side.get(None))

    def figure(self, side: tuple[str, str], load: int, what: str) -> float | None:
        """Median of ``prefill``, ``decoding`` or ``total``; None if it failed, or was never run."""
        turns = self.turns.get(side, {}).get(load, [])
        if not turns or self.failure(side, load) is not None:
            return None
        return float(median(getattr(turn, what) for turn in turns))

    def peers(self) -> list[str]:
        return list(dict.fromkeys(peer for peer, _ in self.order))

    def best(self, peer: str, load: int) -> tuple[str, str] | None:
        """The peer's fastest variant at a load, prefill included; None if it has none."""
        rates = {side: self.figure(side, load, "total") for side in self.order if side[0] == peer}
        found = {side: rate for side, rate in rates.items() if rate is not None}
        return max(found, key=lambda side: found[side]) if found else None

    def as_document(self) -> dict[str, Any]:
        """As plain JSON values."""
        sides = []
        for side in self.order:
            agreement = self.agreement.get(side)
            sides.append(
                {
                    "peer": side[0],
                    "variant": side[1],
                    "agreement": None
                    if agreement is None
                    else {"same": agreement.same, "start": agreement.same_start, "prompts": agreement.prompts},
                    "failures": {
                        "all" if load is None else str(load): reason
                        for load, reason in self.failures.get(side, {}).items()
                    },
                    "loads": {
                        str(load): {what: self.figure(side, load, what) for what in ("prefill", "decoding", "total")}
                        | {
                            "rounds": [
                                {"prefill_s": turn.prefill_s, "total_s": turn.total_s, "tokens": turn.tokens}
                                for turn in turns
                            ]
                        }
                        for load, turns in self.turns.get(side, {}).items()
                    },
                }
            )
        return {"versions": self.versions, "sides": sides}


def agreement(answers: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> Agreement:
    """Token for token."""
    pairs = list(zip(answers, reference, strict=True))
    return Agreement(
        same=sum(list(one) == list(other) for one, other in pairs),
        same_start=sum(list(one[:START]) == list(other[:START]) for one, other in pairs),
        prompts=len(pairs),
    )


def without_end(answer: Sequence[int], eos: Sequence[int]) -> list[int]:
    """An answer up to its end-of-sequence token, which some peers give and others keep."""
    end = next((i for i, token in enumerate(answer) if token in eos), len(answer))
    return list(answer[:end])


def produced(answers: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Tokens that answers without their ends took: the end counts where it came before the limit."""
    return sum(len(answer) + (len(answer) < max_tokens) for answer in answers)
