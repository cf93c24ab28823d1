"""A step between its acts, and the engine's side of the seam: what a controller sees before a step and after it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from dynaspec.contract.proposer import Drafts, Ints, Offers
from dynaspec.contract.step import DraftView, Ended, Limits, SpecPlan, StepOutcome, StepView, Work
from dynaspec.contract.tree import MAX_NODES
from dynaspec.propose.router import came_true, view_columns
from dynaspec.schedule.batch import Committed, StepBatch, StepResult

from .target import Verified


@dataclass(slots=True)
class ScheduledStep:
    """A step that has been planned."""

    batch: StepBatch
    view: StepView
    plan: SpecPlan
    began_s: float
    """When planning began, by the engine's clock."""
    plan_s: float = 0.0
    """Seconds that the controller's plan took."""
    offers: tuple[Offers | None, ...] = ()
    """What each proposer was found to offer before the plan."""


@dataclass(slots=True)
class ExecutedStep:
    """A step that has been run, but not committed."""

    scheduled: ScheduledStep
    drafts: Drafts
    drafted: DraftView
    """The controller's view of them."""
    plan: SpecPlan
    """After the trim."""
    verified: Verified
    draft_s: float
    verify_s: float


def build_view(
    batch: StepBatch,
    limits: Limits,
    lag: tuple[tuple[int, ...], ...],
    offers: tuple[Offers | None, ...],
) -> StepView:
    """Columns of the decoding requests; rooms are never negative.

    Args:
        lag: see ``StepView``.
        offers: of each proposer.
    """
    room = tuple(np.maximum(batch.room, 0).tolist())
    params = [request.params for request in batch.requests]
    expected = tuple([p.expected_acceptance for p in params])
    return StepView(
        step=batch.step,
        ids=batch.ids,
        context_len=tuple(batch.lengths.tolist()),
        room_depth=room,
        room_nodes=tuple(np.clip(batch.tokens.shape[1] - 1 - batch.lengths, 0, MAX_NODES).tolist()),
        max_draft=tuple([p.max_draft_tokens for p in params]),
        temperature=tuple([p.temperature for p in params]),
        lag=lag,
        offers=view_columns(offers),
        prefill_tokens=batch.prefill_tokens,
        waiting=batch.waiting,
        limits=limits,
        expected_acceptance=() if expected.count(None) == len(expected) else expected,
    )


def why_off(view: StepView, plan: SpecPlan) -> dict[str, int]:
    """For how many requests a speculating engine is not going to draft, by the reason."""
    off = plan.depth.count(0)
    if not off or view.limits.draft_lens[-1] == 0:
        return {}
    if 0 not in view.max_draft and 0 not in view.room_depth:
        return {"policy": off}
    columns = zip(plan.depth, view.max_draft, view.room_depth, strict=True)
    return Counter(
        "requested_off" if asked == 0 else "no_room" if room == 0 else "policy"
        for depth, asked, room in columns
        if depth == 0
    )


def build_outcome(
    ran: ExecutedStep, committed: Committed, offers: tuple[Offers | None, ...], step_s: float, plan_s: float = 0.0
) -> StepOutcome:
    """
    Args:
        offers: that the step's plan was made with, for the texts as they were before it.
    """
    batch, result = ran.scheduled.batch, ran.verified.result
    return StepOutcome(
        plan_step=batch.step,
        ids=batch.ids,
        proposer=ran.plan.proposer,
        requested=ran.scheduled.plan.nodes,
        drafted=ran.drafted.length,
        verified=tuple(result.verified.tolist()),
        accepted=tuple(np.minimum(result.accepted, committed.emitted).tolist()),
        emitted=tuple(committed.emitted.tolist()),
        ended=how_ended(result, committed),
        early_exit=_early_exit(ran.drafts),
        confidence=ran.drafted.confidence,
        work=Work(
            rows_per_pass=ran.drafts.rows_per_pass,
            verify_rows=ran.verified.verify_rows,
            kv_tokens=ran.verified.kv_tokens,
            prefill_rows=ran.verified.prefill_rows,
            kv_skipped=ran.drafts.kv_skipped,
            kv_redone=ran.drafts.kv_redone,
        ),
        draft_s=ran.draft_s,
        verify_s=ran.verify_s,
        step_s=step_s,
        signal=ran.drafted.signal,
        tested=_tested(result.verdict, ran.drafts.parents),
        plan_s=plan_s,
        came_true=came_true(offers, batch.tokens, batch.lanes, batch.lengths, batch.lengths + committed.emitted),
    )


def how_ended(result: StepResult, committed: Committed) -> tuple[Ended, ...]:
    """[B] why each run of accepted drafts ended."""
    refused = [False] * len(result.verified) if result.refused is None else result.refused.tolist()
    whole = result.accepted == result.verified if result.whole is None else result.whole
    columns = zip(result.verified, result.accepted, committed.emitted, whole, refused, strict=True)
    return tuple(_ended(*request) for request in columns)


def _ended(verified: int, accepted: int, emitted: int, whole: bool, refused: bool) -> Ended:
    if verified == 0:
        return "none"
    if emitted <= accepted:
        return "stopped"
    if whole:
        return "all_accepted"
    return "invalid" if refused else "rejected"


def _tested(verdict: Ints | None, parents: Ints | None) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
    """``StepOutcome.tested``."""
    if verdict is None or parents is None:
        return None
    walks = []
    for judged, above in zip(verdict.tolist(), parents.tolist(), strict=True):
        children: dict[int, list[int]] = {}
        for node, (how, parent) in enumerate(zip(judged, above, strict=True)):
            if how:
                children.setdefault(parent, []).append(node if how > 0 else ~node)
        walks.append(tuple(tuple(children[parent]) for parent in sorted(children)))
    return tuple(walks)


def _early_exit(drafts: Drafts) -> tuple[bool, ...]:
    if drafts.early_exit is None:
        return (False,) * len(drafts.lens)
    return tuple(drafts.early_exit.tolist())
