"""What a step did, read off the columns of its outcome; shared by all that price steps or learn from drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .step import ProposerTraits, StepOutcome, Work


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
