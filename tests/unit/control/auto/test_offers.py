"""``auto`` learns of lookups from what they offered, also where nothing of it was drafted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaspec.contract.step import Limits, ProposerTraits, StepOutcome, StepView, Work
from dynaspec.control.auto import AutoController
from dynaspec.control.estimate.settings import AutoSettings
from support.closed_loop import COSTS, LIMITS, LONGEST, Loop

LOOKUP = ProposerTraits("ngram", "none", has_confidence=False)
ALONE = replace(LIMITS, proposers=(LOOKUP,))
BESIDE = replace(LIMITS, proposers=(ProposerTraits("draft_model"), LOOKUP))
MATCH = 4


def view_of(limits: Limits, step: int) -> StepView:
    plain = Loop(2, limits=limits).view(step, [0, 0])
    columns = len(limits.proposers)
    return replace(plain, lag=((0, 0),) * columns, offers=(*(None,) * (columns - 1), ((MATCH, 8), (0, 0))))


def outcome_of(view: StepView, right: int, *, drafted: int = 0, known: bool = True) -> StepOutcome:
    """Two tokens have come for the first request. So many of them are those on offer; ``drafted`` of these were tried
    and turned out right."""
    proposer = len(view.limits.proposers) - 1
    column = ((MATCH, 2, right), (0, 0, 0))
    return StepOutcome(
        plan_step=view.step,
        ids=view.ids,
        proposer=(proposer, proposer),
        requested=(drafted, 0),
        drafted=(drafted, 0),
        verified=(drafted, 0),
        accepted=(drafted, 0),
        emitted=(2, 1),
        ended=("all_accepted" if drafted else "none", "none"),
        early_exit=(False, False),
        confidence=((), ()),
        work=Work(verify_rows=2 + drafted, kv_tokens=400),
        verify_s=2e-3,
        step_s=2.2e-3,
        came_true=(*(None,) * proposer, column) if known else (),
    )


def believed(right: int, *, limits: Limits = ALONE, steps: int = 20, drafted: int = 0, known: bool = True) -> float:
    """The chance of a token whose match is not known to be special, after so many such outcomes."""
    controller = AutoController(limits, longest=LONGEST, costs=COSTS)
    for step in range(steps):
        view = view_of(limits, step)
        controller.plan(view)
        controller.observe(outcome_of(view, right, drafted=drafted, known=known))
    controller.plan(view_of(limits, steps))
    lookup = controller.estimates()["proposers"]["ngram"]
    return float(lookup["acceptance"][0])


@pytest.mark.parametrize("limits", [ALONE, BESIDE], ids=["alone", "beside a model"])
def test_offers_teach_though_nothing_was_drafted(limits: Limits) -> None:
    unknown = believed(0, limits=limits, known=False)
    assert believed(0, limits=limits) < unknown - 0.2
    assert believed(2, limits=limits) > unknown + 0.1


def test_what_was_drafted_is_learnt_once() -> None:
    """The host has compared it too."""
    assert believed(1, drafted=1) == believed(1, drafted=1, known=False)


def tried(*, compared: bool, steps: int = 600) -> int:
    """Steps in which a lookup drafts whose offers are always wrong, beside a model that does not draft."""
    controller, drafting = AutoController(BESIDE, longest=LONGEST, costs=COSTS), 0
    for step in range(steps):
        view = view_of(BESIDE, step)
        plan = controller.plan(view)
        drafted = tuple(depth if owner == 1 else 0 for depth, owner in zip(plan.depth, plan.proposer, strict=True))
        drafting += any(drafted)
        outcome = replace(
            outcome_of(view, 0, known=False),
            proposer=plan.proposer,
            requested=plan.depth,
            drafted=drafted,
            verified=drafted,
            ended=tuple("rejected" if n else "none" for n in drafted),
            emitted=(1, 1),
            came_true=(None, ((MATCH, 1, 0), (0, 0, 0))) if compared else (),
        )
        controller.observe(outcome)
    return drafting


def test_a_lookup_whose_offers_are_compared_is_not_probed() -> None:
    """But for the first plans, before an outcome has come: what they begin goes on for a few steps."""
    settings = AutoSettings()
    assert tried(compared=True) <= settings.settling + 2 * settings.probe
    assert tried(compared=True, steps=50) == tried(compared=True)


def test_where_offers_are_not_compared_probes_find_out() -> None:
    assert tried(compared=False) > tried(compared=False, steps=50)
