"""After what is hard to believe, drafters are doubted; after what happens now and then, they are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from dynaspec.contract.step import StepOutcome
from dynaspec.control.auto.doubt import Doubt
from dynaspec.control.auto.drafter import Drafter


@dataclass
class Believed:
    """A drafter whose first tokens are taken to be right with this chance."""

    right: float
    doubts: int = 0

    def chance(self) -> float:
        return self.right

    def doubt(self) -> None:
        self.doubts += 1


def watch(doubt: Doubt, *drafts: tuple[int, int, int], trial: bool = False) -> None:
    """A step of requests with (proposer, tokens drafted, tokens accepted)."""
    proposer, drafted, accepted = zip(*drafts, strict=True)
    none = (0,) * len(drafts)
    outcome = StepOutcome(
        plan_step=0,
        ids=tuple(map(str, range(len(drafts)))),
        proposer=proposer,
        requested=drafted,
        drafted=drafted,
        verified=drafted,
        accepted=accepted,
        emitted=tuple(a + 1 for a in accepted),
        ended=("none",) * len(drafts),
        early_exit=tuple(map(bool, none)),
        confidence=((),) * len(drafts),
    )
    doubt.watch(outcome, trial=trial)


def doubting(*drafters: Believed) -> Doubt:
    return Doubt(cast(list[Drafter], list(drafters)))


@pytest.mark.parametrize(("right", "failures"), [(0.95, 3), (0.9, 4), (0.5, 12), (0.1, 76), (1.0, 1)])
def test_the_better_a_drafter_was_the_fewer_failures_are_believed(right: float, failures: int) -> None:
    drafter = Believed(right)
    doubt = doubting(drafter)
    for _ in range(failures - 1):
        watch(doubt, (0, 4, 0))
    assert drafter.doubts == 0
    watch(doubt, (0, 4, 0))
    assert drafter.doubts == 1


def test_an_accepted_token_clears_the_doubt_and_a_plain_step_does_not() -> None:
    cleared, kept = Believed(0.9), Believed(0.9)
    for drafter, between in ((cleared, (0, 4, 1)), (kept, (0, 0, 0))):
        doubt = doubting(drafter)
        for _ in range(3):
            watch(doubt, (0, 4, 0))
        watch(doubt, between)
        watch(doubt, (0, 4, 0))
    assert (cleared.doubts, kept.doubts) == (0, 1)


def test_several_requests_at_once_are_as_many_misses_and_only_who_drafted_is_doubted() -> None:
    drafters = Believed(0.9), Believed(0.9)
    watch(doubting(*drafters), (0, 2, 0), (0, 1, 0), (0, 4, 0), (0, 4, 0), (1, 0, 0))
    assert [drafter.doubts for drafter in drafters] == [1, 0]


@pytest.mark.parametrize(("trial", "accepted", "doubts"), [(True, 1, 1), (True, 0, 0), (False, 1, 0)])
def test_a_trial_that_was_accepted_is_a_surprise_where_little_was_expected(
    trial: bool, accepted: int, doubts: int
) -> None:
    drafter = Believed(0.2)
    watch(doubting(drafter), (0, 1, accepted), trial=trial)
    assert drafter.doubts == doubts


def test_a_trial_of_a_good_drafter_that_was_accepted_is_none() -> None:
    drafter = Believed(0.85)
    watch(doubting(drafter), (0, 1, 1), (0, 1, 0), trial=True)
    assert drafter.doubts == 0
