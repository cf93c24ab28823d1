"""Loads what is compiled, which would otherwise be taken for the cost of the first steps."""

from __future__ import annotations

from functools import cache

import numpy as np

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import DraftView, Ended, Limits, ProposerTraits, StepOutcome, StepView, Work

from .controller import AutoController
from .costs import Drafting, StepCosts
from .lengths import admit_by_survival, match_features, merge_depths, survivals
from .parts import row_s

_REQUESTS, _LONGEST = 8, 4
_STEPS = 4
"""The first ones are no measure."""


@cache
def load_kernels() -> None:
    """Once a process: takes a scratch controller through steps with drafts of a model and of a lookup."""
    lookup = ProposerTraits("lookup", passes_per_draft="none", has_confidence=False)
    limits = Limits(draft_lens=tuple(range(_LONGEST + 1)), proposers=(ProposerTraits("model"), lookup))
    controller = AutoController(limits, longest=_LONGEST)
    view = _view(limits)
    plan = controller.plan(view)
    rejected: Ended = "rejected"
    confidence = tuple((0.9,) * depth for depth in plan.depth)
    controller.trim(view, plan, DraftView(plan.depth, confidence, signal=confidence))
    outcome = StepOutcome(
        plan_step=view.step,
        ids=view.ids,
        proposer=plan.proposer,
        requested=plan.depth,
        drafted=plan.depth,
        verified=plan.depth,
        accepted=(0,) * _REQUESTS,
        emitted=(1,) * _REQUESTS,
        ended=(rejected,) * _REQUESTS,
        early_exit=(False,) * _REQUESTS,
        confidence=confidence,
        work=Work(rows_per_pass=(_REQUESTS,), verify_rows=2 * _REQUESTS, kv_tokens=_REQUESTS),
        draft_s=1e-4,
        verify_s=1e-3,
        step_s=2e-3,
    )
    controller.observe(outcome)
    _load_rest()


def _load_rest() -> None:
    """The scratch controller's rows are too cheap for it to trim, its look-up finds nothing that pays, and first steps
    teach no costs."""
    costs, drafting = StepCosts(PassCosts(), [True]), Drafting(0, passes=1, drawn=1, ingested=0, seconds=1e-4)
    for _ in range(_STEPS):
        costs.observe(2, 1, 1.0, 1e-3, drafting)
        costs.observe_whole(2, 1, 1.0, 1e-3, drafting)
    row_s(costs.target, 1.0)
    one, some = np.ones(1, np.int64), np.ones(8)
    survival = survivals(1.0, some, some[:1], match_features(one, one), np.zeros(1), one)
    admit_by_survival(survival, one, one, 1.0, some, 1.0, 1)
    merge_depths(one, 1, one, one, 1.0, 1.0, np.zeros(3), one.copy())


def _view(limits: Limits) -> StepView:
    column = (_LONGEST,) * _REQUESTS
    return StepView(
        step=0,
        ids=tuple(map(str, range(_REQUESTS))),
        context_len=column,
        room_depth=column,
        room_nodes=column,
        max_draft=(None,) * _REQUESTS,
        temperature=(0.0,) * _REQUESTS,
        lag=((0,) * _REQUESTS,) * 2,
        offers=(None, ((2, _LONGEST),) * _REQUESTS),
        prefill_tokens=0,
        waiting=0,
        limits=limits,
    )
