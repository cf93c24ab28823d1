"""Passes and time of decoding a known text one request at a time, under any rule for draft lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .rollout import Floats, Ints, Rollouts


@dataclass(frozen=True, slots=True)
class Iteration:
    """One verification step. It emits one token more than it accepts, or the accepted ones if the last ends the text,
    of which one less counts here."""

    drafted: int
    accepted: int
    looked_up: int = 0
    """Drafted tokens that were found in the text, without a drafter pass."""


Walk = tuple[Iteration, ...]


@dataclass(frozen=True, slots=True)
class KnownText:
    """A greedy continuation of n tokens, and what the drafter makes of it."""

    rollouts: Rollouts
    max_tokens: int
    """What the request may have: the engine drafts up to its end, not knowing where the text ends."""

    @property
    def tokens(self) -> int:
        return len(self.rollouts.runs)


def walk(text: KnownText, lengths: Ints) -> Walk:
    """The steps that decode a text. Its first token comes from the prompt's pass, which is not counted.

    Args:
        lengths: [n] draft length that the rule takes at each position.
    """
    runs, n = text.rollouts.runs.tolist(), text.tokens
    wanted = lengths.tolist()
    steps = []
    at = 1
    while at < n:
        drafted = min(wanted[at], text.max_tokens - at - 1)
        accepted = min(drafted, runs[at], n - at - 1)  # behind the text's end nothing counts
        steps.append(Iteration(drafted, accepted))
        at += accepted + 1
    return tuple(steps)


def fixed(text: KnownText, k: int) -> Walk:
    """Always k tokens."""
    return walk(text, np.full(text.tokens, k, dtype=np.int64))


def oracle(text: KnownText) -> Walk:
    """Drafts exactly to the first mismatch: all that is accepted, and nothing that is not."""
    left = text.tokens - 1 - np.arange(text.tokens)
    return walk(text, np.minimum(text.rollouts.runs, left))


def stopped(signal: Floats, below: npt.ArrayLike) -> Ints:
    """[n, longest] → [n]: draft lengths when drafting ends after the first token whose signal is below.

    Args:
        below: one threshold, or one a position.
    """
    low = signal < np.asarray(below)
    lengths: Ints = np.where(low.any(axis=1), low.argmax(axis=1) + 1, signal.shape[1]).astype(np.int64)
    return lengths


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step that drafts k tokens for one request, by k from 0: k drafter passes and one target pass."""

    seconds: Mapping[int, float]
    row_s: float = 0.0
    """Of a token that was looked up: another row of the target's pass."""

    def of(self, k: int) -> float:
        """Linear between the lengths measured, and beyond the last."""
        if k in self.seconds:
            return self.seconds[k]
        known = sorted(self.seconds)
        at = min(max(bisect_left(known, k), 1), len(known) - 1)
        low, high = known[at - 1], known[at]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return self.seconds[low] + slope * (k - low)

    def total(self, steps: Sequence[Iteration]) -> float:
        """Seconds of all of them."""
        return sum(self.of(step.drafted - step.looked_up) + self.row_s * step.looked_up for step in steps)


def monotone(seconds: Mapping[int, float], row_s: float = 0.0) -> StepCosts:
    """Costs that do not fall with the draft length: the nearest in squares, by pooling neighbours that violate it.

    A longer draft is never cheaper; a measurement that says so has met a busy machine.
    """
    pools: list[tuple[float, list[int]]] = []
    for k in sorted(seconds):
        mean, members = seconds[k], [k]
        while pools and pools[-1][0] > mean:
            before, earlier = pools.pop()
            mean = (before * len(earlier) + mean * len(members)) / (len(earlier) + len(members))
            members = earlier + members
        pools.append((mean, members))
    return StepCosts({k: mean for mean, members in pools for k in members}, row_s)


@dataclass(frozen=True, slots=True)
class Passes:
    """What decoding took, in passes."""

    target: int
    drafter: int
    tokens: int
    """Emitted by these steps."""

    @classmethod
    def of(cls, steps: Sequence[Iteration]) -> Passes:
        drafter = sum(s.drafted - s.looked_up for s in steps)
        return cls(len(steps), drafter, sum(s.accepted + 1 for s in steps))


def tokens_per_second(walks: Sequence[Walk], costs: StepCosts) -> float:
    """Of several texts one after the other."""
    tokens = sum(Passes.of(steps).tokens for steps in walks)
    return tokens / sum(costs.total(steps) for steps in walks)
