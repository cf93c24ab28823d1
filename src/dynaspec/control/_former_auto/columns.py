"""What ``auto`` reads out of the seam's columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import DraftView, ProposerTraits, StepOutcome, Work

from .acceptance import logits
from .agreement import Pending
from .costs import Drafting

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def drafting_of(outcome: StepOutcome, traits: Sequence[ProposerTraits]) -> Drafting | None:
    """What drafting took, where one proposer did all of it; beside a model, look-ups take nothing that counts."""
    if not any(outcome.requested):
        return None
    work = outcome.work
    used = {p for p, k in zip(outcome.proposer, outcome.requested, strict=True) if k > 0}
    if len(used) > 1:
        used = {p for p in used if traits[p].passes_per_draft != "none"}
    if len(used) != 1:
        return None
    drafting = sum(p in used and k > 0 for p, k in zip(outcome.proposer, outcome.drafted, strict=True))
    if not drafting and not work.rows_per_pass:
        return None
    ingested = max(0, work.rows_per_pass[0] - drafting) if work.rows_per_pass else 0
    drawn = sum(work.rows_per_pass) - ingested
    return Drafting(used.pop(), len(work.rows_per_pass), drawn, ingested, outcome.draft_s)


def drafting_in(work: Work, traits: Sequence[ProposerTraits]) -> Drafting | None:
    """The drafting in a step whose seconds are known as a whole only; None where there was none of its own.

    It may have been for another plan than the one whose tokens the step verified, so only a host's single model can
    be told. A pass that runs in any case is not counted: it belongs to the target's, with the same rows.
    """
    passes = work.rows_per_pass
    models = [index for index, one in enumerate(traits) if one.passes_per_draft != "none"]
    if len(models) != 1:
        return None
    index = models[0]
    if traits[index].idle_pass:
        return Drafting(index, len(passes) - 1, sum(passes[1:]), 0, 0.0) if len(passes) > 1 else None
    return Drafting(index, len(passes), sum(passes), 0, 0.0) if passes else None


def drafting_before(outcome: StepOutcome, traits: Sequence[ProposerTraits]) -> Drafting | None:
    """What drafting for an outcome's plan was, if a step before did it; see ``drafting_in``."""
    drafted = [
        (traits[p], k)
        for p, k in zip(outcome.proposer, outcome.requested, strict=True)
        if k and traits[p].passes_per_draft != "none"
    ]
    if not drafted:
        return None
    deepest = max(k if one.passes_per_draft == "per_token" else 1 for one, k in drafted)
    return drafting_in(Work(rows_per_pass=(len(drafted),) * deepest), traits)


def lacks_of(steps: Sequence[tuple[StepOutcome, Pending | None]], proposer: int) -> Ints:
    """[Σ B] tokens that a model lacked of each request as it was tried; 0 in steps that were no trials."""
    found: list[int] = []
    for outcome, pending in steps:
        lag = pending.lag[proposer] if pending is not None and pending.lag else ()
        found.extend(lag if len(lag) == len(outcome.ids) else (0,) * len(outcome.ids))
    return np.array(found, dtype=np.int64)


def matches_of(steps: Sequence[tuple[StepOutcome, Pending | None]], proposer: int) -> Ints:
    """[Σ B] match lengths that steps' drafts came from, one step after the other; 1 where that is not known."""
    found: list[int] = []
    for outcome, pending in steps:
        offers = pending.offers[proposer] if pending is not None and pending.offers else None
        known = offers is not None and len(offers) == len(outcome.ids)
        found.extend([match for match, _ in offers] if known and offers is not None else [1] * len(outcome.ids))
    return np.array(found, dtype=np.int64)


def evidence_of(source: DraftView | StepOutcome, lens: Sequence[int]) -> Floats:
    """[N] what speaks for each drafted token, one request after the other; 0 where a proposer says nothing."""
    total = sum(lens)
    if source.signal and sum(map(len, source.signal)) == total:
        return np.fromiter(chain.from_iterable(source.signal), np.float64, total)
    found = np.zeros(total)
    first = 0
    for i, length in enumerate(lens):
        if length and source.signal and len(source.signal[i]) >= length:
            found[first : first + length] = source.signal[i][:length]
        elif length and len(source.confidence[i]) >= length:
            found[first : first + length] = logits(np.array(source.confidence[i][:length]))
        first += length
    return found


def evidence_of_all(outcomes: Sequence[StepOutcome]) -> Floats:
    """``evidence_of`` all drafted tokens of some steps, one step after the other."""
    rows = [row for outcome in outcomes for row in outcome.signal]
    if list(map(len, rows)) == [length for outcome in outcomes for length in outcome.drafted]:
        return np.array(list(chain.from_iterable(rows)), dtype=np.float64)
    return np.concatenate([evidence_of(outcome, outcome.drafted) for outcome in outcomes])


def echo_of(drafts: DraftView, lens: Sequence[int]) -> Floats:
    """[N] the part of the evidence that hangs on which token was drawn."""
    total = sum(lens)
    if drafts.repeat_bonus and sum(map(len, drafts.repeat_bonus)) == total:
        return np.fromiter(chain.from_iterable(drafts.repeat_bonus), np.float64, total)
    found = np.zeros(total)
    first = 0
    for i, length in enumerate(lens):
        if length and drafts.repeat_bonus and len(drafts.repeat_bonus[i]) >= length:
            found[first : first + length] = drafts.repeat_bonus[i][:length]
        first += length
    return found
