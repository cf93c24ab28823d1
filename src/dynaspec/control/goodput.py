"""Dynamic speculative decoding: the draft length with the best goodput, by batch size and acceptance.

The objective AL(k) / ITL(batch size, k) over a measured profile is that of SmartSpec (Liu et al., 2406.14066) as vLLM's
dynamic speculative decoding has it (vllm-project/vllm pull request 32374).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from dynaspec.contract.step import StepOutcome, StepView

from .profile import Profile
from .schedule import Range, joined

PRIOR_WEIGHT = 1.0
"""Observations that the profile's rate counts for beside measured ones: a position seen once is not yet known."""
FORGETTING = 1.0 - 1.0 / 512
"""What a step leaves of the weight of earlier observations, so that rates follow the traffic."""


class Goodput:
    """k* = argmax AL(k) / ITL(batch size, k), the smallest on ties; batch size = decoding requests.

    Args:
        profile: step times, and acceptance until (or unless) it is measured.
        cap: longest draft; the profile's own maximum holds too.
        lengths: draft lengths that can run, 0 among them.
    """

    def __init__(self, profile: Profile, cap: int, lengths: Sequence[int]) -> None:
        self._profile = profile
        self._cap = cap
        self._lengths = tuple(lengths)
        self._measured = MeasuredAcceptance(profile.acceptance_rate_per_pos) if profile.is_online else None
        self._rates = profile.acceptance_rate_per_pos
        self._best: dict[int, int] = {}

    def length(self, view: StepView) -> int:
        batch = max(1, len(view.ids))
        best = self._best.get(batch)
        if best is None:
            best = self._best[batch] = self._profile.best_length(batch, self._rates, self._cap, among=self._lengths)
        return best

    def observe(self, outcome: StepOutcome) -> None:
        if self._measured is None:
            return
        self._measured.observe(outcome)
        if self._measured.steps >= self._profile.warmup_steps:
            self._rates = self._measured.rates()
            self._best.clear()

    def estimates(self) -> Mapping[str, Any]:
        return {"acceptance_rate_per_pos": list(self._rates)}


class MeasuredAcceptance:
    """Acceptance per position from verified drafts; where there are none, a profile's.

    The rate of position j is the product a_1 … a_j of conditional ones, each from the drafts that reached the position:
    those whose earlier tokens were all accepted and whose token there was verified. So drafts that were too short say
    nothing about it (the Kaplan–Meier estimate of a survival with censoring). Dividing by all drafts instead would
    count short ones as misses, and a length that was once reduced could never grow again.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        """
        Args:
            prior: unconditional rate per position; its conditional rates hold until there are observations, and again
                when the last one is long ago.
        """
        self._prior = [rate / before if before > 0.0 else 0.0 for before, rate in pairwise((1.0, *prior))]
        self._reached = [0.0] * len(prior)
        self._accepted = [0.0] * len(prior)
        self.steps = 0
        """Observed steps in which something was drafted."""

    def observe(self, outcome: StepOutcome) -> None:
        """Takes in a step's verified drafts."""
        positions = len(self._prior)
        reached, accepted = [0] * (positions + 1), [0] * (positions + 1)
        for length, ended in zip(outcome.accepted, outcome.ended, strict=True):
            accepted[min(length, positions)] += 1
            # Only a refusal says something about the next position; a draft's end or the request's does not.
            reached[min(length + (ended in ("rejected", "invalid")), positions)] += 1
        self.steps += any(outcome.drafted)
        self._add(self._reached, reached)
        self._add(self._accepted, accepted)

    def rates(self) -> tuple[float, ...]:
        """Unconditional acceptance per position, non-increasing."""
        columns = zip(self._prior, self._reached, self._accepted, strict=True)
        return tuple(accumulate(((hit + PRIOR_WEIGHT * p) / (seen + PRIOR_WEIGHT) for p, seen, hit in columns), mul))

    def _add(self, counts: list[float], ending_at: Sequence[int]) -> None:
        """Adds a step, given how many drafts went exactly so far; a draft counts at every position up to there."""
        so_far = 0
        for position in range(len(counts), 0, -1):
            so_far += ending_at[position]
            counts[position - 1] = counts[position - 1] * FORGETTING + so_far


def schedule_of(profile: Profile, cap: int, max_batch: int) -> list[Range]:
    """The k of every batch size from 1 to ``max_batch`` at the profile's own rates, as ranges (low, high, k)."""
    return list(joined(_lengths(profile, cap, max_batch)))


def _lengths(profile: Profile, cap: int, max_batch: int) -> Iterator[Range]:
    rates = profile.acceptance_rate_per_pos
    return ((batch, batch, profile.best_length(batch, rates, cap)) for batch in range(1, max_batch + 1))
