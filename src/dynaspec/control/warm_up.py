"""Loads what is compiled, which would otherwise be taken for the cost of the first steps."""

from __future__ import annotations

from functools import cache

from dynaspec.contract.step import DraftView, Ended, Limits, ProposerTraits, StepOutcome, StepView, Work

from .auto import AutoController

_LONGEST, _STEPS = 4, 8
_REJECTED: tuple[Ended, ...] = ("rejected", "rejected")


@cache
def load_kernels() -> None:
    """Once a process: takes a scratch controller through steps with drafts of a model and of a lookup."""
    lookup, four = ProposerTraits("lookup", passes_per_draft="none", has_confidence=False), (4, 4)
    limits = Limits(
        draft_lens=tuple(range(_LONGEST + 1)), proposers=(ProposerTraits("model", trees=True), lookup), can_branch=True
    )
    controller = AutoController(limits, longest=_LONGEST, tree=(2, _LONGEST))
    lag, offers, none = ((0, 0),) * 2, (None, ((2, _LONGEST), (0, 0))), (None, None)
    for step in range(_STEPS):
        view = StepView(step, ("a", "b"), four, four, four, none, (0.0, 0.0), lag, offers, 0, 0, limits)
        plan = controller.plan(view)
        shown = tuple((0.9,) * depth for depth in plan.depth)
        controller.trim(view, plan, DraftView(plan.depth, shown, signal=shown))
        drafted, ended = plan.depth, _REJECTED
        work = Work(rows_per_pass=(2,) if any(drafted) else (), verify_rows=2 + sum(drafted), kv_tokens=8)
        counts = (plan.proposer, drafted, drafted, drafted, (0, 0), (1, 1), ended, (False, False), shown, work)
        controller.observe(StepOutcome(step, view.ids, *counts, 1e-4, 1e-3, 2e-3))
