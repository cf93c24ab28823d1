"""The policy ``goodput``: lengths by a measured profile, and by acceptance as it is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

import numpy as np
import pytest

from dynaspec.contract.signals import conditional
from dynaspec.contract.step import Controller, Explains, StepOutcome
from dynaspec.control.policies.goodput import OnlineRates, schedule_of
from dynaspec.control.profile import Profile
from unit.control.seam import H100_PROFILE, ONLINE_PROFILE, Fate, accepted, controller, limits, outcome, rejected, view

HOST = limits()
H100 = Profile.load(H100_PROFILE)


def depth(made: Controller, ids: str = "a") -> int:
    return made.plan(view(ids, HOST)).depth[0]


def rates(made: Controller) -> list[float]:
    assert isinstance(made, Explains)
    return list(made.estimates()["acceptance_rate_per_pos"])


class TestOffline:
    def test_the_length_is_the_profiles_best_for_the_decoding_requests(self) -> None:
        made = controller(HOST, dynamic_config_path=H100_PROFILE)
        for batch in range(1, 9):
            seen = view("abcdefgh"[:batch], HOST, prefill=500)
            best = H100.best_length(batch, H100.acceptance_rate_per_pos, 5)
            assert made.plan(seen).depth == (best,) * batch

    def test_what_is_accepted_does_not_matter(self) -> None:
        made = controller(HOST, dynamic_config_path=H100_PROFILE)
        before = depth(made)
        for step in range(50):
            made.observe(outcome(step, a=rejected(2)))
        assert depth(made) == before

    def test_it_chooses_among_lengths_that_the_host_can_run(self) -> None:
        host = limits(0, 1, 5)
        made = controller(host, dynamic_config_path=H100_PROFILE)
        best = H100.best_length(1, H100.acceptance_rate_per_pos, 5, among=(0, 1, 5))
        assert (
            made.plan(view("a", host)).depth == (best,) != (depth(controller(HOST, dynamic_config_path=H100_PROFILE)),)
        )

    def test_the_configured_maximum_holds(self) -> None:
        assert depth(controller(HOST, dynamic_config_path=H100_PROFILE, num_speculative_tokens=1)) == 1


class TestOnline:
    """``online_profile.json``: rates 0.7, 0.5, 0.3, 0.2 and two warm-up steps."""

    def online(self, **keys: Any) -> Controller:
        return controller(HOST, dynamic_config_path=ONLINE_PROFILE, **keys)

    def test_the_profile_holds_while_warming_up(self) -> None:
        made = self.online()
        made.observe(outcome(0, a=rejected(4)))
        made.observe(outcome(1))  # a step without drafts does not count
        assert rates(made) == [0.7, 0.5, 0.3, 0.2]
        made.observe(outcome(2, a=rejected(4)))
        assert rates(made)[0] < 0.3

    def test_the_length_follows_what_is_measured(self) -> None:
        made = self.online()
        start = depth(made)
        for step in range(60):
            made.observe(outcome(step, a=rejected(4)))
        assert depth(made) == 0 < start
        for step in range(600):
            made.observe(outcome(step, a=accepted(4)))
        assert depth(made) == 4

    def test_positions_that_no_draft_reached_keep_the_profiles_conditional_rate(self) -> None:
        made = self.online()
        for step in range(2000):
            made.observe(outcome(step, a=accepted(1)))
        first, *others = rates(made)
        assert first == pytest.approx(1.0, abs=0.01)
        assert others == pytest.approx([0.5 / 0.7, 0.3 / 0.7, 0.2 / 0.7], abs=0.01)

    def test_short_drafts_do_not_lock_the_length_down(self) -> None:
        made = self.online()
        for step in range(300):
            made.observe(outcome(step, a=accepted(4)))
        for step in range(2000):
            made.observe(outcome(step, a=accepted(1)))
        assert depth(made) == 4

    def test_after_a_long_time_without_drafts_it_tries_again(self) -> None:
        made = self.online()
        for step in range(100):
            made.observe(outcome(step, a=rejected(4)))
        assert depth(made) == 0
        for step in range(6000):
            made.observe(outcome(step))
        assert depth(made) > 0

    def test_a_threshold_ends_drafts_before_its_length(self) -> None:
        plan = self.online(draft_confidence_threshold=0.4).plan(view("a", HOST))
        assert plan.depth == (depth(self.online()),)
        assert plan.stop is not None
        assert plan.stop.below[0] == 0.4


def learnt(profile: Sequence[float], *outcomes: StepOutcome) -> list[float]:
    """Conditional acceptance per position after these steps."""
    measured = OnlineRates(profile)
    for each in outcomes:
        measured.observe(each)
    return conditional(measured.rates())


class TestOnlineRates:
    def test_each_position_is_measured_on_the_drafts_that_reached_it(self) -> None:
        # Reached by 30, 30 and 10 (of three, one draft ended early, one was rejected there): accepted 30, 20, 10.
        steps = [outcome(i, a=accepted(3), b=accepted(2), c=rejected(3, after=1)) for i in range(10)]
        first, second, third = learnt((0.5, 0.25, 0.125), *steps)
        assert first == pytest.approx(30.5 / 31, abs=0.05)
        assert second == pytest.approx(20.5 / 31, abs=0.05)
        assert third == pytest.approx(10.5 / 11, abs=0.05)

    def test_drafts_that_ended_before_a_position_say_nothing_about_it(self) -> None:
        seen = [outcome(i, a=accepted(3), b=rejected(3, after=2)) for i in range(5)]
        short = [outcome(i, a=accepted(1), b=rejected(3)) for i in range(5, 500)]
        before, after = learnt((0.5, 0.25, 0.125), *seen), learnt((0.5, 0.25, 0.125), *seen, *short)
        assert after[1:] == pytest.approx(before[1:])
        assert after[0] == pytest.approx(0.5, abs=0.05)
        assert before[0] > 0.8

    def test_a_position_seen_once_is_not_yet_known(self) -> None:
        assert 0.5 < learnt((0.5,), outcome(0, a=accepted(1)))[0] < 0.8
        assert 0.2 < learnt((0.5,), outcome(0, a=rejected(1)))[0] < 0.5

    def test_a_request_that_ended_inside_its_draft_is_no_rejection(self) -> None:
        stopped = replace(outcome(0, a=rejected(3, after=1)), ended=("stopped",))
        assert learnt((0.5,) * 3, stopped) == learnt((0.5,) * 3, outcome(0, a=accepted(1)))

    def test_a_grammars_refusal_is_a_rejection(self) -> None:
        refused = replace(outcome(0, a=rejected(3, after=1)), ended=("invalid",))
        assert learnt((0.5,) * 3, refused) == learnt((0.5,) * 3, outcome(0, a=rejected(3, after=1)))

    def test_longer_drafts_than_the_profile_has_positions(self) -> None:
        longer = outcome(0, a=accepted(9), b=rejected(9, after=5))
        assert learnt((0.5, 0.25), longer) == learnt((0.5, 0.25), outcome(0, a=accepted(2), b=accepted(2)))

    def test_positions_far_back_are_told_apart(self) -> None:
        """More of them than a model of all positions has."""
        steps = [outcome(i, a=accepted(12) if i % 2 else rejected(12, after=10)) for i in range(100)]
        rates = learnt([0.7**j for j in range(1, 13)], *steps)
        assert rates[9] > 0.95
        assert rates[10] == pytest.approx(0.5, abs=0.05)
        assert rates[11] > 0.95

    def test_it_finds_the_truth_although_lengths_vary(self) -> None:
        rng = np.random.default_rng(5)
        truth = (0.9, 0.6, 0.8, 0.5)
        measured = OnlineRates((0.2, 0.1, 0.05, 0.01))
        for step in range(1500):
            fates = {}
            for request in "abcdefgh":
                k = int(rng.integers(0, 5))
                hits = [bool(rng.random() < truth[j]) for j in range(k)]
                run = hits.index(False) if False in hits else k
                fates[request] = Fate(k, run, run < k)
            measured.observe(outcome(step, **fates))
        assert measured.rates() == pytest.approx(tuple(accumulate(truth, mul)), abs=0.05)

    def test_a_position_that_the_profile_rules_out_is_believed_once_seen(self) -> None:
        measured = OnlineRates((0.5, 0.0, 0.0))
        assert measured.rates() == (0.5, 0.0, 0.0)
        for step in range(50):
            measured.observe(outcome(step, a=accepted(3)))
        assert measured.rates()[2] > 0.8

    @pytest.mark.parametrize("wrong", [0.05, 0.95])
    def test_a_profile_that_is_wrong_is_found_out(self, wrong: float) -> None:
        fate = rejected(1) if wrong > 0.5 else accepted(1)
        assert abs(learnt((wrong,), *(outcome(i, a=fate) for i in range(40)))[0] - wrong) > 0.8

    def test_what_is_not_reached_for_long_is_as_the_profile_says_again(self) -> None:
        measured = OnlineRates((0.7, 0.5))
        for step in range(20):
            measured.observe(outcome(step, a=rejected(2, after=1)))
        assert conditional(measured.rates())[1] < 0.1
        for step in range(3000):
            measured.observe(outcome(step, a=accepted(1)))
        first, second = conditional(measured.rates())
        assert first > 0.95
        assert second == pytest.approx(0.5 / 0.7)


class TestScheduleOf:
    def test_it_is_the_best_length_of_every_batch_size(self) -> None:
        spelled = [k for low, high, k in schedule_of(H100, 5, 256) for _ in range(low, high + 1)]
        assert spelled == [H100.best_length(batch, H100.acceptance_rate_per_pos, 5) for batch in range(1, 257)]

    def test_ranges_are_as_few_as_can_be(self) -> None:
        ranges = schedule_of(H100, 2, 300)
        assert ranges[0][0] == 1
        assert ranges[-1][1] == 300
        assert all(a[1] + 1 == b[0] and a[2] != b[2] for a, b in pairwise(ranges))
        assert all(k <= 2 for _, _, k in ranges)
