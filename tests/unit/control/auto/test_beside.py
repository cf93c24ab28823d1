"""Look-ups beside a model: who drafts for which request, and what is expected of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import Limits, ProposerTraits, SpecPlan, StepOutcome, StepView, Work
from dynaspec.control.auto import AutoController

LONGEST = 8
LIMITS = Limits(
    draft_lens=tuple(range(LONGEST + 1)),
    proposers=(ProposerTraits("model"), ProposerTraits("lookup", passes_per_draft="none", has_confidence=False)),
)
TARGET = ((1, 10e-3), (8, 10.4e-3), (64, 14e-3))
CHEAP, DEAR = ((1, 0.5e-3), (16, 0.6e-3)), ((1, 50e-3), (16, 60e-3))
WORTH_IT = ((1, 4e-3), (16, 4.2e-3))
"""But not if a token were worth much less."""
NOTHING = (0, 0)
FASTER = 20


def auto(drafter: tuple[tuple[int, float], ...] = CHEAP) -> AutoController:
    return AutoController(LIMITS, longest=LONGEST, costs=PassCosts(target=TARGET, drafters=(drafter, ())))


def view(*offers: tuple[int, int], step: int = 0, limits: Limits = LIMITS) -> StepView:
    """A request for each look-up: (length of the match, tokens found)."""
    size = len(offers)
    return StepView(
        step=step,
        ids=tuple(map(str, range(size))),
        context_len=(100,) * size,
        room_depth=(50,) * size,
        room_nodes=(50,) * size,
        max_draft=(None,) * size,
        temperature=(0.0,) * size,
        lag=((0,) * size,) * 2,
        offers=(None, offers),
        prefill_tokens=0,
        waiting=0,
        limits=limits,
    )


def who(plan: SpecPlan) -> list[str]:
    return [("model", "lookup")[p] if k else "nobody" for p, k in zip(plan.proposer, plan.depth, strict=True)]


def test_a_long_match_spares_the_drafter() -> None:
    plan = auto().plan(view((16, 8), NOTHING, (2, 1)))
    assert who(plan) == ["lookup", "model", "model"]
    assert plan.depth[0] == 4  # the very first drafts are short
    assert plan.stop is not None


def test_who_leaves_the_passes_leaves_them_to_the_others() -> None:
    """What a short match brings a request is more than its share of the drafts, but less than all of them bring."""
    drafter = ((1, 1.5e-3), (16, 1.53e-3))
    assert who(auto(drafter).plan(view((8, 2)))) == ["lookup"]
    assert who(auto(drafter).plan(view((8, 2), NOTHING))) == ["model", "model"]


def test_where_nothing_is_found_the_model_drafts_as_if_it_were_alone() -> None:
    alone = AutoController(
        replace(LIMITS, proposers=LIMITS.proposers[:1]), longest=LONGEST, costs=PassCosts(TARGET, (CHEAP,))
    )
    nothing = view(NOTHING, NOTHING)
    plan = auto().plan(nothing)
    lonely = alone.plan(replace(nothing, lag=nothing.lag[:1], offers=(None,)))
    assert (plan.depth, plan.proposer, plan.stop) == (lonely.depth, lonely.proposer, lonely.stop)


def test_no_pass_is_expected_where_all_is_found() -> None:
    controller = auto()
    assert who(controller.plan(view(NOTHING))) == ["model"]
    drafting = controller.estimates()["predicted_step_s"]
    assert who(controller.plan(view((16, 8), step=1))) == ["lookup"]
    found = controller.estimates()
    assert found["predicted_step_s"] < drafting - 0.5e-3
    assert found["predicted_emitted"] > 4.0


def test_beside_plain_decoding_too() -> None:
    plan = auto(DEAR).plan(view((16, 8), NOTHING, (2, 3)))
    assert plan.stop is None
    assert who(plan) == ["lookup", "nobody", "lookup"]
    assert plan.depth[0] > plan.depth[2] > 0


@pytest.mark.parametrize(("row_s", "better"), [(1.5e-3, True), (6e-3, False)])
def test_dear_rows_are_for_the_likely_and_very_dear_ones_for_nobody(row_s: float, better: bool) -> None:
    steep = PassCosts(target=((1, 10e-3), (64, 10e-3 + 63 * row_s)), drafters=(DEAR, ()))
    plan = AutoController(LIMITS, longest=LONGEST, costs=steep).plan(view((1, 8), (16, 8)))
    assert (plan.depth[1] > plan.depth[0]) is better
    assert any(plan.depth) is better


def test_a_request_gets_no_more_than_it_wants() -> None:
    wanting = replace(view((16, 8), (16, 8)), max_draft=(3, 0))
    assert auto().plan(wanting).depth == (3, 0)


@pytest.mark.parametrize("drafter", [CHEAP, DEAR])
def test_what_was_found_changes_from_step_to_step(drafter: tuple[tuple[int, float], ...]) -> None:
    controller = auto(drafter)
    seen = [who(controller.plan(view(offer, step=step)))[0] for step, offer in enumerate([NOTHING, (16, 8), NOTHING])]
    other = "model" if drafter is CHEAP else "nobody"
    assert seen == [other, "lookup", other]


@pytest.mark.parametrize("last", [{"room_depth": (0,)}, {"max_draft": (0,)}])
def test_a_request_at_its_end_tells_nothing_of_the_next(last: dict[str, tuple[int, ...]]) -> None:
    controller = auto()
    assert who(controller.plan(view(NOTHING))) == ["model"]
    assert controller.plan(replace(view(NOTHING, step=1), **last)).depth == (0,)
    assert controller.plan(view(NOTHING, step=2)).depth[0] > 0
    assert controller.estimates()["mode"] == "speculate"


def committed(plan: SpecPlan, ids: tuple[str, ...]) -> StepOutcome:
    """All tokens of a plan were accepted; a step took what it costs."""
    drafted, lookup = sum(plan.depth), plan.proposer[0] == 1
    draft_s = 0.0 if lookup else WORTH_IT[0][1] * drafted
    rows = 1 + drafted
    verify_s = float(np.interp(rows, *zip(*TARGET, strict=True)))
    return StepOutcome(
        plan_step=plan.step,
        ids=ids,
        proposer=plan.proposer,
        requested=plan.depth,
        drafted=plan.depth,
        verified=plan.depth,
        accepted=plan.depth,
        emitted=(rows,),
        ended=("all_accepted",),
        early_exit=(False,),
        confidence=((0.9,) * drafted,),
        work=Work(rows_per_pass=() if lookup else (1,) * drafted, verify_rows=rows, kv_tokens=100 * rows),
        draft_s=draft_s,
        verify_s=verify_s,
        step_s=draft_s + verify_s,
    )


def test_one_long_match_that_was_wrong_does_not_end_look_ups() -> None:
    controller, wrong = auto(), view((16, 8))
    plan = controller.plan(wrong)
    assert who(plan) == ["lookup"]
    controller.observe(replace(committed(plan, wrong.ids), accepted=(0,), emitted=(1,), ended=("rejected",)))
    # Another request, of which nothing is known yet.
    assert who(controller.plan(replace(view((16, 8), step=1), ids=("other",)))) == ["lookup"]


def test_a_stretch_that_repeats_the_text_leaves_the_worth_of_drafting_as_it_was() -> None:
    """What look-ups gain there says nothing of the text behind it."""
    controller = auto(WORTH_IT)
    assert who(controller.plan(view(NOTHING))) == ["model"]
    for step in range(1, 200):
        found = view((16, LONGEST), step=step)
        plan = controller.plan(found)
        controller.observe(committed(plan, found.ids))
    behind = [controller.plan(view(NOTHING, step=step)) for step in range(200, 208)]
    assert [who(plan) for plan in behind] == [["model"]] * 8
    assert controller.estimates()["mode"] == "speculate"


@pytest.mark.parametrize(("offer", "asked"), [(NOTHING, (0.05, 0.28)), ((16, LONGEST), (0.95, 1.0))])
def test_look_ups_that_bring_nothing_are_asked_now_and_then(offer: tuple[int, int], asked: tuple[float, float]) -> None:
    """On a fast target, where asking them in every step takes more than a hundredth of the time."""
    target, drafter = (tuple((rows, seconds / FASTER) for rows, seconds in curve) for curve in (TARGET, CHEAP))
    controller = AutoController(LIMITS, longest=LONGEST, costs=PassCosts(target=target, drafters=(drafter, ())))
    plans: list[SpecPlan] = []
    for step in range(400):
        seen = view(offer, step=step)
        if plans and plans[-1].next_needs != "all":
            seen = replace(seen, offers=(None, None))
        plans.append(controller.plan(seen))
        came = committed(plans[-1], seen.ids)
        times = (came.draft_s / FASTER, came.verify_s / FASTER, came.step_s / FASTER)
        controller.observe(replace(came, draft_s=times[0], verify_s=times[1], step_s=times[2]))
    assert all(who(plan) != ["nobody"] for plan in plans)
    assert asked[0] <= sum(plan.next_needs == "all" for plan in plans) / len(plans) <= asked[1]
