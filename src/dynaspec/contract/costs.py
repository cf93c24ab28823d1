"""What steps are priced by: what passes cost, measured when a host starts, and what a step did to draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .step import ProposerTraits, StepOutcome, Work

_TYPICAL_ROW, _FARTHEST = 0.03, 4096
"""A row, as a share of a pass, where a curve has one point only; most rows to which a curve is continued."""

Curve = tuple[tuple[int, float], ...]
"""(rows, seconds) of a model pass, rows ascending."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of model passes by their rows, from a few trials at start-up: where online cost models begin."""

    target: Curve = ()
    """Rows that see next to no context."""
    drafters: tuple[Curve, ...] = ()
    """One curve for each of ``Limits.proposers``, of the passes after a draft's first, over rows that see some hundred
    KV entries, or over tokens, where a pass gives several a row; empty for one that runs no model."""
    first_s: tuple[float, ...] = ()
    """For each proposer, what a draft's first pass takes on top: the target's pass has emptied the caches."""
    context_s: float = 0.0
    """What a row of the target takes for each KV entry that it sees."""
    read_s: float = 0.0
    """What a request takes for each of its KV entries, however many rows see it."""

    def target_points(self) -> list[tuple[float, float]]:
        """The target's curve made non-decreasing, with a first point at one row, and beyond its last rows one at each
        doubling, as its last two points go on; empty where it was not measured."""
        points: list[tuple[float, float]] = []
        far: list[tuple[float, float]] = []
        highest = 0.0
        for rows, seconds in self.target:
            highest = max(highest, seconds)
            points.append((float(rows), highest))
        if not points:
            return []
        slopes = [(b - a) / (n - m) for (m, a), (n, b) in pairwise(points)] or [_TYPICAL_ROW * highest]
        (first, first_s), (last, last_s) = points[0], points[-1]
        one = [(1.0, max(0.1 * first_s, first_s - slopes[0] * (first - 1.0)))] if first > 1.0 else []
        while not far or far[-1][0] < _FARTHEST:
            beyond = 2.0 * (far[-1][0] if far else last)
            far.append((beyond, last_s + slopes[-1] * (beyond - last)))
        return [*one, *points, *far]

    def draft(self, proposer: int) -> tuple[float, float, float] | None:
        """Seconds of a proposer's draft to start, of a pass, and of a row in it; None where they were not measured."""
        curve = self.drafters[proposer] if proposer < len(self.drafters) else ()
        if not curve:
            return None
        (low, low_s), (high, high_s) = curve[0], curve[-1]
        row = max((high_s - low_s) / (high - low) if high > low else 0.0, 5e-4 * low_s)
        one = max(0.1 * low_s, low_s - row * low)
        first = self.first_s[proposer] if proposer < len(self.first_s) else 0.0
        return max(first, 0.01 * one), one, row


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a step did to draft, with one proposer."""

    proposer: int
    passes: int
    drawn: int
    """Rows that a token was drawn from, in all passes together; tokens, where one pass gives several."""
    read_in: int = 0
    """Rows on top of them in the first pass: committed tokens that the drafter had missed."""


def runs_model(traits: ProposerTraits) -> bool:
    """Whether the proposer drafts by model passes; lookups do not."""
    return traits.passes_per_draft != "none"


def drafting_of(outcome: StepOutcome, proposers: Sequence[ProposerTraits]) -> Drafting | None:
    """What was drafted in a step whose plan's tokens it verified; None where several models drafted, or nothing did.

    Beside a model, lookups take nothing that counts.
    """
    passes = outcome.work.rows_per_pass
    drafted = [p for p, n in zip(outcome.proposer, outcome.drafted, strict=True) if n]
    used = {p for p in drafted if runs_model(proposers[p])} or set(drafted)
    if len(used) != 1:
        return None
    index = used.pop()
    read_in = max(0, passes[0] - drafted.count(index)) if passes else 0
    drawn = sum(passes) - read_in
    if proposers[index].passes_per_draft == "one":
        drawn = sum(n for p, n in zip(outcome.proposer, outcome.drafted, strict=True) if p == index)
    return Drafting(index, len(passes), drawn, read_in)


def drafting_in(work: Work, proposers: Sequence[ProposerTraits], requests: int) -> Drafting | None:
    """The drafting in a step whose seconds are known as a whole only; None where there was none of its own.

    It may have been for another plan than the one whose tokens the step verified, so only a host's single model can be
    told. A pass that runs in any case is not counted: it belongs to the target's, with the same rows.

    Args:
        requests: that decode; a first pass over more rows reads in what the drafter had missed.
    """
    models = [index for index, traits in enumerate(proposers) if runs_model(traits)]
    if len(models) != 1:
        return None
    if proposers[models[0]].idle_pass:
        later = work.rows_per_pass[1:]
        return Drafting(models[0], len(later), sum(later)) if later else None
    passes = work.rows_per_pass
    read_in = max(0, passes[0] - requests) if passes else 0
    return Drafting(models[0], len(passes), sum(passes) - read_in, read_in) if passes else None


def drafting_before(outcome: StepOutcome, proposers: Sequence[ProposerTraits]) -> Drafting | None:
    """What drafting for an outcome's plan was, if a step before did it; see ``drafting_in``."""
    columns = zip(outcome.proposer, outcome.requested, strict=True)
    drafted = [(proposers[p], k) for p, k in columns if k and runs_model(proposers[p])]
    deepest = max((k if traits.passes_per_draft == "per_token" else 1 for traits, k in drafted), default=0)
    return drafting_in(Work(rows_per_pass=(len(drafted),) * deepest), proposers, len(drafted))
