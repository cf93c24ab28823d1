"""Which proposer drafts for which request, in steps that speculate and in trials of drafting; what these are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import DraftView, SpecPlan, StepView, StopRule

from .columns import echo_of, evidence_of
from .costs import Drafting, StepCosts
from .drafter import Drafter, Situation, Wish
from .parts import row_s

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_TRIAL_LENGTH = 1
_TRIAL_COST = 1.7
"""Most that a trial may take, in plain steps and without drafter passes, where there are requests to leave out."""


def route(
    drafters: Sequence[Drafter], asked: Sequence[int], view: StepView, situation: Situation
) -> tuple[Wish, Ints | None]:
    """Every request goes to the proposer that gains most for it.

    Args:
        drafters: one for each proposer.
        asked: indices of those that may draft.

    Returns:
        What all of them together would be asked for; each request's proposer [B], or None if the first has all.
    """
    wishes = [drafters[i].wish(view, situation) for i in asked]
    if list(asked) == [0]:
        return wishes[0], None
    owner = np.array(asked)[np.argmax([wish.worth for wish in wishes], axis=0)]
    whole = situation.cap
    total = Wish(np.zeros_like(whole), np.zeros(whole.size))
    for index in asked:
        # Once more for its own requests alone, which share the cost of its passes.
        own = drafters[index].wish(view, replace(situation, cap=np.where(owner == index, whole, 0)))
        total.depth = np.where(owner == index, own.depth, total.depth)
        total.worth = np.where(owner == index, own.worth, total.worth)
        total.hoped, total.expected = total.hoped + own.hoped, total.expected + own.expected
        total.seconds, total.rows = total.seconds + own.seconds, total.rows + own.rows
        total.context += own.context
    return total, owner


def trial_drafts(
    drafters: Sequence[Drafter], view: StepView, situation: Situation, wish: Ints, costs: StepCosts, ragged: bool
) -> tuple[Ints, Ints]:
    """Short drafts for as many requests as cost little, by the first proposer that has something to offer.

    Args:
        wish: [B] lengths that would be drafted now; if nobody would, all are tried.
        ragged: requests may be left out.

    Returns:
        [B] lengths; [B] proposers.
    """
    cap, requests, plain_s = situation.cap, len(view.ids), costs.pass_s(len(view.ids), 0.0, 0.0)
    depth, owner = np.zeros_like(cap), np.zeros_like(cap)
    extra = np.zeros(requests)
    shortest = np.minimum(wish if wish.any() else _TRIAL_LENGTH, _TRIAL_LENGTH)
    for index, drafter in enumerate(drafters):
        offered = np.minimum(drafter.caps(view, cap), shortest)
        chosen = (depth == 0) & (offered > 0)
        owner[chosen], depth[chosen] = index, offered[chosen]
        extra[chosen] = drafter.catching_up(view)[chosen]
    if ragged:
        # Those that lag least, as many as fit into the allowance, but one at least.
        order = np.argsort(extra + (depth == 0) * plain_s * requests, kind="stable")
        rows = requests + np.cumsum(depth[order])
        cost = np.cumsum(extra[order]) + [costs.pass_s(float(r), 0.0, 0.0) for r in rows]
        depth[order[1:][cost[1:] > _TRIAL_COST * plain_s]] = 0
    return depth, owner


def trial_s(drafters: Sequence[Drafter], view: StepView, situation: Situation, costs: StepCosts) -> float:
    """Seconds beyond a step of plain decoding that the least ``trial_drafts`` take if they bring nothing."""
    for index, drafter in enumerate(drafters):
        if (drafter.caps(view, situation.cap) > 0).any():
            drafting_s = costs.draft_s(Drafting(index, passes=1, drawn=1, ingested=0, seconds=0.0))
            return (
                float(drafter.catching_up(view).min()) + drafting_s + float(row_s(costs.target, float(len(view.ids))))
            )
    return 0.0


def open_ends(
    drafters: Sequence[Drafter], situation: Situation, depth: Ints, owner: Ints | None
) -> tuple[Ints, StopRule | None]:
    """Where a rule ends drafts by what they turn out to be, the length expected is no limit.

    Args:
        depth: [B] lengths expected.
        owner: [B] proposers; None = the first for all.

    Returns:
        [B] most tokens granted; the rule, if there is one.
    """
    for index, drafter in enumerate(drafters):
        mine = depth > 0 if owner is None else (owner == index) & (depth > 0)
        if drafter.stops and mine.any():
            stop = drafter.rule(situation)
            return np.where(mine, np.minimum(situation.cap, _open_end(stop)), depth), stop
    return depth, None


def survival_of(
    drafters: Sequence[Drafter], view: StepView, places: Ints, plan: SpecPlan, drafts: DraftView, lens: Sequence[int]
) -> Floats:
    """[N] chances that each drafted token and all before it are accepted; ``lens`` [B] of the drafts."""
    evidence, echo, lengths = evidence_of(drafts, lens), echo_of(drafts, lens), np.array(lens, np.int64)
    drafting = {proposer for proposer, length in zip(plan.proposer, lens, strict=True) if length}
    if len(drafting) == 1:
        drafter = drafters[drafting.pop()]
        return drafter.survivals(view, places, np.arange(lengths.size), lengths, evidence, echo)
    owner = np.array(plan.proposer, dtype=np.int64)
    slot_owner = np.repeat(owner, lengths)
    survival = np.zeros(evidence.size)
    for index in drafting:
        mine, slots = np.flatnonzero(owner == index), slot_owner == index
        survival[slots] = drafters[index].survivals(
            view, places[mine], mine, lengths[mine], evidence[slots], echo[slots]
        )
    return survival


def _open_end(rule: StopRule | None) -> int:
    """Draft tokens after which the rule stops whatever happens."""
    if rule is None:
        return 0
    return next((done for done, below in enumerate(rule.below, 1) if below >= 1.0), len(rule.below) + 1)
