"""A step of assisted generation: Transformers' loop runs it, a controller decides how long its draft is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.generation import CandidateGenerator

from dynaspec.contract.proposer import Offers
from dynaspec.contract.step import Controller, DraftView, Ended, Limits, SpecPlan, StepOutcome, StepView, Work
from dynaspec.observe.stats import SpecStats
from dynaspec.propose.router import came_true, view_columns

from .drafters import Draft, Drafter


@dataclass(frozen=True, slots=True)
class Request:
    """What stays the same over the steps of one text."""

    id: str
    max_length: int
    """Tokens, the prompt's included."""
    temperature: float
    """0 = greedy."""
    cached: int
    """Tokens of the prompt that the target has already read."""


@dataclass(slots=True)
class _Open:
    """A step between its draft and its end."""

    view: StepView
    granted: SpecPlan
    plan: SpecPlan
    offers: tuple[Offers | None, ...]
    """What each drafter had to offer."""
    draft: Draft
    """As it was drafted."""
    verified: Draft
    """As it is verified."""
    started: float
    drafted: float
    ended: float = 0.0
    emitted: int = 0
    accepted: int = 0
    came_true: tuple[tuple[tuple[int, int, int], ...] | None, ...] = ()


class ControlledGenerator(CandidateGenerator):  # type: ignore[misc]  # Transformers is not followed
    """Candidates whose number a controller chooses, for one text.

    A step ends where the next one begins, or with the text: so its seconds include what Transformers does in between.
    """

    def __init__(
        self,
        request: Request,
        drafters: Sequence[Drafter],
        controller: Controller,
        limits: Limits,
        steps: Iterator[int],
        stats: Sequence[SpecStats],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            drafters: one for each of the ``limits``' proposers.
            steps: numbers of steps, ascending over all texts of the controller.
            clock: seconds.
        """
        self._request = request
        self._drafters = drafters
        self._controller = controller
        self._limits = limits
        self._steps = steps
        self._stats = stats
        self._clock = clock
        self._unread = True
        self._open: _Open | None = None

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The text with its draft, and the logits that the draft was drawn from."""
        started = self._clock()
        self._commit(started)
        offers = tuple([drafter.offer(input_ids) for drafter in self._drafters])
        view = self._view(input_ids.shape[1], offers)
        plan = self._controller.plan(view)
        depth = max(0, min(plan.depth[0], view.room_depth[0], self._limits.draft_lens[-1]))
        granted = plan if plan.depth == (depth,) else plan.with_depth((depth,))
        drafter = self._drafters[granted.proposer[0]]
        draft = drafter.draft(input_ids, depth, granted.stop) if depth else Draft(input_ids, 0)
        if draft.length > depth:  # in another vocabulary the same text may have more tokens
            draft = draft.cut(depth)
        trimmed = self._controller.trim(view, granted, _draft_view(draft))
        verified = draft.cut(max(0, min(trimmed.depth[0], draft.length)))
        self._open = _Open(view, granted, trimmed, offers, draft, verified, started, self._clock())
        return verified.sequence, verified.logits

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """The target has verified; Transformers calls it once a step, with the text as it is now."""
        step = self._open
        if step is None:
            return
        length = step.view.context_len[0]
        step.emitted = input_ids.shape[1] - length
        step.accepted = _common(input_ids, step.verified.sequence, length)
        emitted, zero = input_ids[:, length:].cpu().numpy().astype(np.int32), np.zeros(1, np.int64)
        step.came_true = came_true(step.offers, emitted, zero, zero, zero + step.emitted)
        step.ended = self._clock()
        self._drafters[step.granted.proposer[0]].settle(length, step.draft.length, step.accepted)
        self._unread = False

    def finish(self) -> None:
        """The text has ended, or was given up."""
        self._commit(None)
        self._controller.forget([self._request.id])

    def _view(self, length: int, offers: tuple[Offers | None, ...]) -> StepView:
        room = max(0, self._request.max_length - length - 1)
        return StepView(
            step=next(self._steps),
            ids=(self._request.id,),
            context_len=(length,),
            room_depth=(room,),
            room_nodes=(room,),
            max_draft=(None,),
            temperature=(self._request.temperature,),
            lag=tuple((drafter.lag(length),) for drafter in self._drafters),
            offers=view_columns(offers),
            prefill_tokens=self._prefill(length),
            waiting=0,
            limits=self._limits,
        )

    def _prefill(self, length: int) -> int:
        """Tokens before the last that the target reads in this step: the first pass has the prompt and the draft."""
        return max(0, length - 1 - self._request.cached) if self._unread else 0

    def _commit(self, now: float | None) -> None:
        """The step that is open, if its tokens became output, is told to the controller.

        Args:
            now: where it ends; None = where the target's pass did.
        """
        step, self._open = self._open, None
        if step is None or not step.emitted:
            return
        outcome = _outcome(step, (step.ended if now is None else now) - step.started)
        self._controller.observe(outcome)
        for stats in self._stats:
            stats.record(outcome)
            stats.skip(_why_none(step))


def _draft_view(draft: Draft) -> DraftView:
    return DraftView(
        length=(draft.length,),
        confidence=(draft.confidence,),
        signal=(draft.signal,) if draft.signal else (),
        repeat_bonus=(draft.repeat_bonus,) if draft.repeat_bonus else (),
    )


def _outcome(step: _Open, step_s: float) -> StepOutcome:
    view, rows, prefill = step.view, 1 + step.verified.length, step.view.prefill_tokens
    length = view.context_len[0]
    last = length + step.verified.length
    first = length - prefill
    return StepOutcome(
        plan_step=view.step,
        ids=view.ids,
        proposer=step.plan.proposer,
        requested=step.granted.depth,
        drafted=(step.draft.length,),
        verified=(step.verified.length,),
        accepted=(step.accepted,),
        emitted=(step.emitted,),
        ended=(_ended(step),),
        early_exit=(step.draft.early_exit,),
        confidence=(step.draft.confidence,),
        work=Work(
            rows_per_pass=step.draft.rows_per_pass,
            verify_rows=rows,
            kv_tokens=(first + last) * (rows + prefill) // 2,
            prefill_rows=prefill,
        ),
        draft_s=step.drafted - step.started,
        verify_s=step.ended - step.drafted,
        step_s=step_s,
        signal=(step.draft.signal,) if step.draft.signal else (),
        came_true=step.came_true,
    )


def _ended(step: _Open) -> Ended:
    if not step.verified.length:
        return "none"
    if step.emitted <= step.accepted:
        return "stopped"
    return "all_accepted" if step.accepted == step.verified.length else "rejected"


def _why_none(step: _Open) -> dict[str, int]:
    """Why nothing was drafted, as ``SpecCounts.skipped`` has it."""
    if not step.granted.depth[0]:
        return {"policy" if step.view.room_depth[0] else "no_room": 1}
    return {} if step.draft.length else {"no_match": 1}


def _common(text: torch.Tensor, drafted: torch.Tensor, start: int) -> int:
    """Tokens from ``start`` on that two texts [1, …] have in common, up to the first that differs."""
    ours, theirs = text[0, start:].tolist(), drafted[0, start:].tolist()
    same = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            break
        same += 1
    return same
