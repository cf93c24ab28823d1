"""The engine's side of the seam: what a controller sees before a step and after it."""

from __future__ import annotations

import numpy as np

from dynaspec.contract.proposer import Drafts
from dynaspec.contract.step import DraftView, Ended, Limits, SpecPlan, StepOutcome, StepView, Work
from dynaspec.schedule.batch import StepBatch
from dynaspec.schedule.result import Committed

from .acts import Ran


def build_view(
    batch: StepBatch, limits: Limits, lag: tuple[int, ...], offers: tuple[tuple[int, int], ...] | None
) -> StepView:
    """Columns of the decoding requests; rooms are never negative."""
    room = tuple(batch.room.clip(min=0).tolist())
    return StepView(
        step=batch.step,
        ids=batch.ids,
        context_len=tuple(batch.lengths.tolist()),
        room_depth=room,
        room_nodes=room,
        max_draft=tuple(request.params.max_draft_tokens for request in batch.requests),
        temperature=tuple(request.params.temperature for request in batch.requests),
        lag=(lag,),
        offers=(offers,),
        prefill_tokens=batch.prefill_tokens,
        waiting=batch.waiting,
        limits=limits,
    )


def why_off(view: StepView, plan: SpecPlan) -> list[tuple[str, str]]:
    """(request id, reason) for every request that a speculating engine is not going to draft for."""
    if view.limits.draft_lens[-1] == 0:
        return []
    columns = zip(view.ids, plan.depth, view.max_draft, view.room_depth, strict=True)
    return [
        (request_id, "requested_off" if wish == 0 else "no_room" if room == 0 else "policy")
        for request_id, depth, wish, room in columns
        if depth == 0
    ]


def draft_view(drafts: Drafts) -> DraftView:
    return DraftView(length=tuple(drafts.lens.tolist()), confidence=_confidence(drafts))


def build_outcome(ran: Ran, committed: Committed, step_s: float) -> StepOutcome:
    batch, result = ran.scheduled.batch, ran.verified.result
    return StepOutcome(
        plan_step=batch.step,
        ids=batch.ids,
        proposer=ran.plan.proposer,
        requested=ran.scheduled.plan.depth,
        drafted=tuple(ran.drafts.lens.tolist()),
        verified=tuple(result.verified.tolist()),
        accepted=tuple(np.minimum(result.accepted, committed.emitted).tolist()),
        emitted=tuple(committed.emitted.tolist()),
        ended=tuple(
            _ended(verified, accepted, emitted)
            for verified, accepted, emitted in zip(result.verified, result.accepted, committed.emitted, strict=True)
        ),
        early_exit=_early_exit(ran.drafts),
        confidence=_confidence(ran.drafts),
        work=Work(
            rows_per_pass=ran.drafts.rows_per_pass,
            verify_rows=ran.verified.verify_rows,
            kv_tokens=ran.verified.kv_tokens,
            prefill_rows=ran.verified.prefill_rows,
        ),
        draft_s=ran.draft_s,
        verify_s=ran.verify_s,
        step_s=step_s,
    )


def _ended(verified: int, accepted: int, emitted: int) -> Ended:
    if verified == 0:
        return "none"
    if emitted <= accepted:
        return "stopped"
    return "all_accepted" if accepted == verified else "rejected"


def _early_exit(drafts: Drafts) -> tuple[bool, ...]:
    if drafts.early_exit is None:
        return (False,) * len(drafts.lens)
    return tuple(drafts.early_exit.tolist())


def _confidence(drafts: Drafts) -> tuple[tuple[float, ...], ...]:
    if drafts.confidence is None:
        return ((),) * len(drafts.lens)
    return tuple(tuple(row[:n]) for row, n in zip(drafts.confidence.tolist(), drafts.lens.tolist(), strict=True))
