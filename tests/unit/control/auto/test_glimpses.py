"""What is learnt of a drafter that was shown only the latest tokens of a request."""

from __future__ import annotations

import numpy as np
import pytest

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import Limits, ProposerTraits, StepOutcome, Work
from dynaspec.control.auto import AutoController
from dynaspec.control.auto.acceptance import Verdicts
from dynaspec.control.auto.agreement import Pending
from dynaspec.control.auto.columns import lacks_of
from dynaspec.control.auto.costs import StepCosts
from dynaspec.control.auto.drafter import GLIMPSE, ModelDrafter
from dynaspec.control.auto.guard import Mode
from dynaspec.control.auto.prediction import Prediction
from dynaspec.control.profile import Profile
from unit.control.seam import view

ONE = np.ones(1, np.int64)


def chance_after(right: bool, lacking: int, *, glimpses: bool = True) -> float:
    """Of a first token, after a draft of one for a request of which so many tokens had not been read."""
    traits = ProposerTraits("model", glimpses=glimpses)
    drafter = ModelDrafter(traits, 0, StepCosts(PassCosts(), [True]), (), can_stop=False)
    drafter.grow(1)
    drafter.admit(0, None)
    verdict = Verdicts(0 * ONE, ONE, ONE, int(right) * ONE)
    for _ in range(4):
        drafter.observe(verdict, np.zeros(1), lacking * ONE)
    return drafter.chance()


def test_a_miss_says_less_and_a_hit_more_where_it_saw_little() -> None:
    for right in (False, True):
        seen, little = chance_after(right, GLIMPSE), chance_after(right, GLIMPSE + 1)
        assert seen + 0.005 < little < seen + 0.1
        assert chance_after(right, GLIMPSE + 1, glimpses=False) == seen


@pytest.mark.parametrize(("mode", "lag", "lacks"), [("probe_draft", ((7, 90),), [7, 90]), ("speculate", (), [0, 0])])
def test_what_was_lacking_is_noted_of_trials_alone(
    mode: Mode, lag: tuple[tuple[int, ...], ...], lacks: list[int]
) -> None:
    step = StepOutcome(
        plan_step=0,
        ids=("a", "b"),
        proposer=(0, 0),
        requested=(1, 1),
        drafted=(1, 1),
        verified=(1, 1),
        accepted=(1, 0),
        emitted=(2, 1),
        ended=("all_accepted", "rejected"),
        early_exit=(False, False),
        confidence=((), ()),
        work=Work(rows_per_pass=(2,), verify_rows=4, kv_tokens=9),
        draft_s=1e-4,
        verify_s=1e-3,
        step_s=2e-3,
    )
    plain = Prediction(False, 2.0, 1e-3)
    pending = Pending(plain, mode, plain, 0.0, False, (), lag)
    assert lacks_of([(step, pending), (step, None)], 0).tolist() == [*lacks, 0, 0]


COSTS = PassCosts(target=((1, 1e-2), (8, 1.1e-2)), drafters=(((1, 1e-4),),))
PROFILE = Profile(
    batch_stats={1: {0: 10.0, 3: 12.0}}, acceptance_rate_per_pos=(0.9, 0.8, 0.7), max_num_speculative_tokens=3
)


@pytest.mark.parametrize(
    ("glimpses", "profile", "tries"), [(True, None, True), (False, None, False), (True, PROFILE, False)]
)
def test_the_first_draft_is_a_glimpse_unless_the_drafter_is_known_or_reads_all(
    glimpses: bool, profile: Profile | None, tries: bool
) -> None:
    limits = Limits(tuple(range(5)), proposers=(ProposerTraits("model", glimpses=glimpses),))
    controller = AutoController(limits, longest=4, costs=COSTS, warm_start=profile)
    plan = controller.plan(view("a", limits))
    assert (plan.glimpse > 0) is tries
    assert plan.depth[0] == 1 if tries else plan.depth[0] > 1
