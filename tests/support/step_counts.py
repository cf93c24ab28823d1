"""What one step adds to the counters, from the definitions: what the running totals are held against."""

from __future__ import annotations

from itertools import accumulate

from dynaspec.contract.step import StepOutcome
from dynaspec.observe.counts import SpecCounts


def counts_of(outcome: StepOutcome) -> SpecCounts:
    """The counts of one step.

    A step has one target pass unless it had neither decoding requests nor prefill rows.
    """
    work = outcome.work
    with_draft = [e for d, e in zip(outcome.drafted, outcome.emitted, strict=True) if d > 0]
    requested = [k for k in outcome.requested if k > 0]
    return SpecCounts(
        steps=1,
        request_steps=len(outcome.ids),
        target_passes=int(bool(outcome.ids) or work.prefill_rows > 0),
        drafter_passes=len(work.rows_per_pass),
        prefill_rows=work.prefill_rows,
        drafts=len(with_draft),
        draft_tokens=sum(outcome.drafted),
        verified=sum(outcome.verified),
        accepted=sum(outcome.accepted),
        emitted=sum(outcome.emitted),
        draft_emitted=sum(with_draft),
        drafted_per_pos=_per_position(outcome.drafted),
        accepted_per_pos=_per_position(outcome.accepted),
        proposals=len(requested),
        early_exits=sum(outcome.early_exit),
        tokens_requested=sum(requested),
        draft_s=outcome.draft_s,
        verify_s=outcome.verify_s,
        step_s=outcome.step_s,
        kv_skipped=work.kv_skipped,
        kv_redone=work.kv_redone,
    )


def _per_position(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """How many of the lengths reach each position: entry j counts lengths > j."""
    ending_at = [0] * (max(lengths, default=0) + 1)
    for length in lengths:
        ending_at[length] += 1
    return tuple(accumulate(reversed(ending_at[1:])))[::-1]
