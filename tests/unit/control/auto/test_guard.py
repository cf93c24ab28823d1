"""Plain decoding or speculation: how often each is tried, and what measured steps change."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from dynaspec.control.auto.guard import Mode, PlainGuard
from dynaspec.control.auto.prediction import Prediction, Ratio


def decide(guard: PlainGuard, hoped: float, expected: float | None = None) -> Mode:
    """At one request that plain decoding gives one token a second."""
    return guard.decide(hoped, hoped if expected is None else expected, 1.0, 1)


def test_plain_decoding_is_tried_rarely_and_more_rarely_the_clearer_the_case() -> None:
    def tries(advantage: float) -> int:
        guard = PlainGuard()
        modes = [decide(guard, advantage) for _ in range(4000)]
        return sum(mode == "probe_plain" != before for before, mode in pairwise(modes))

    assert 4000 / 60 > tries(1.03) > tries(1.1) > tries(1.3) > tries(3.0) > 0


def test_a_trial_of_plain_decoding_lasts_until_caches_have_settled() -> None:
    guard = PlainGuard()
    modes = "".join(str(int(decide(guard, 1.03) == "probe_plain")) for _ in range(500))
    assert set(modes.strip("0").split("0")) - {""} == {"1" * 8}


def test_drafting_is_tried_again_ever_more_rarely() -> None:
    guard = PlainGuard()
    modes = [decide(guard, 0.5) for _ in range(2000)]
    at = [step for step, mode in enumerate(modes) if mode == "probe_draft"]
    gaps = np.diff(at)
    assert at[0] < 10
    assert (gaps[1:] >= gaps[:-1]).all()
    assert gaps[-1] == gaps[-2]


def leave(guard: PlainGuard, load: int = 1) -> None:
    """Has decoded plainly for a while."""
    for _ in range(20):
        guard.decide(0.5, 0.5, 1.0, load)


def tried(guard: PlainGuard, steps_lost: float, *, good: bool = False, hit: bool = True) -> None:
    """Goes on to the next trial of drafting, which costs so much."""
    while decide(guard, 0.5) != "probe_draft":
        pass
    guard.tried(steps_lost, good=good, hit=hit)


def test_a_trial_that_paid_goes_on() -> None:
    guard = PlainGuard()
    tried(guard, -0.2)
    assert decide(guard, 0.5) == "probe_draft"
    guard.tried(0.1, good=False, hit=True)
    assert decide(guard, 0.5) == "plain"


def test_a_trial_that_went_well_goes_on_though_it_cost_but_not_for_ever() -> None:
    guard = PlainGuard()
    tried(guard, 1.3, good=True)
    on_end = 1
    while decide(guard, 0.5) == "probe_draft" and on_end < 100:
        guard.tried(1.3, good=True, hit=True)
        on_end += 1
    assert on_end == 6
    guard = PlainGuard()
    tried(guard, 1.3, good=False)
    assert decide(guard, 0.5) == "plain"


def test_trials_cost_a_share_of_what_the_best_drafter_would_gain() -> None:
    def trials(best: float) -> int:
        guard, count = PlainGuard(), 0
        for _ in range(4000):
            if guard.decide(0.5, 0.0, 1.0, 1, best) == "probe_draft":
                guard.tried(0.5, good=False, hit=True)
                count += 1
        return count

    assert trials(3.0) == trials(2.0) > 3 * trials(1.02) > 0
    assert trials(1.02) == trials(0.9)  # some, as what drafting costs is not well known


def test_a_drafter_that_has_never_been_right_is_tried_half_as_often() -> None:
    """One that once was may be so again."""

    def trials(first_hit: bool) -> int:
        guard = PlainGuard(only_by_trial=True, tries_first=True)
        tried = 0
        for _ in range(4000):
            if guard.decide(0.5, 0.5, 1.0, 1) == "probe_draft":
                tried += 1
                guard.tried(1.0, good=False, hit=first_hit and tried == 1)
        return tried

    assert trials(False) == pytest.approx(0.5 * trials(True), rel=0.2)


def test_a_change_of_load_clears_the_debt_of_trials() -> None:
    def waits(load: int) -> int:
        guard = PlainGuard()
        tried(guard, 20.0)
        return next(n for n in range(4000) if guard.decide(0.5, 0.0, 1.0, load) == "probe_draft")

    assert waits(4) < 10 < 100 < waits(1)


def test_a_trial_waits_for_a_step_in_which_it_is_seen_what_it_costs_but_not_for_ever() -> None:
    guard = PlainGuard()
    tried(guard, -1.0, good=True)  # the next is due at once
    waited = next(n for n in range(4000) if guard.decide(0.5, 0.5, 1.0, 1, 3.0, math.inf) == "probe_draft")
    assert 60 <= waited <= 70
    tried(guard, -1.0, good=True)
    assert [guard.decide(0.5, 0.5, 1.0, 1, 3.0, trial) for trial in (math.inf, 0.1)] == ["plain", "probe_draft"]


def test_a_trial_waits_until_what_it_takes_is_saved_or_no_more_can_be() -> None:
    def waits(trial: float) -> int:
        guard = PlainGuard()
        tried(guard, 0.1)
        return next(n for n in range(4000) if guard.decide(0.5, 0.0, 1.0, 1, 3.0, trial) == "probe_draft")

    assert 40 < waits(0.0) < 60 < waits(0.5) < 140 < waits(1.5) < 300  # of 0.007 steps; 0.4 are for what follows it
    assert waits(1.6) == waits(20.0)


@pytest.mark.parametrize(("best", "share"), [(1.0, 0.002), (2.0, 0.007)])
def test_no_debt_of_trials_lasts_for_ever(best: float, share: float) -> None:
    guard = PlainGuard()
    tried(guard, 20.0)
    waited = next(n for n in range(4000) if guard.decide(0.5, 0.0, 1.0, 1, best) == "probe_draft")
    next_is_saved = waited - 0.4 / share
    assert 250 <= next_is_saved <= 256


def test_look_ups_beside_plain_decoding_are_paid_for_by_what_they_gain() -> None:
    guard = PlainGuard(only_by_trial=True)
    assert guard.affords_look_ups
    guard.looked_up(0.4)
    waited = 0
    while not guard.affords_look_ups:
        decide(guard, 0.5)
        waited += 1
    assert 0.4 / 0.02 < waited < 0.4 / 0.002
    guard.looked_up(-30.0)  # saved, but not all of it
    for lost, affords in ((1.5, True), (1.5, False)):
        guard.looked_up(lost)
        assert guard.affords_look_ups is affords


@pytest.mark.parametrize("advantage", [0.5, 1.2])
def test_trials_cost_a_small_share_of_the_time(advantage: float) -> None:
    """Even where drafting promises much and never keeps it."""
    guard, lost = PlainGuard(only_by_trial=True), 0.0
    leave(guard)
    for _ in range(4000):
        if decide(guard, advantage) == "probe_draft":
            guard.tried(1.5, good=False, hit=True)
            lost += 1.5
    assert 0.0 < lost <= 0.02 * 4000 + 1.5


def test_where_nothing_is_known_beforehand_a_promise_alone_does_not_lead_back_to_drafting() -> None:
    for only_by_trial, expected in ((True, "plain"), (False, "speculate")):
        guard = PlainGuard(only_by_trial=only_by_trial)
        leave(guard)
        tried(guard, 2.5)  # more than was saved
        assert decide(guard, 1.5, 0.5) == expected
        guard = PlainGuard(only_by_trial=only_by_trial)
        leave(guard)
        tried(guard, 1.0)  # less: another trial is due
        assert (decide(guard, 1.5, 0.5) == "speculate") is not only_by_trial
    guard = PlainGuard(only_by_trial=True)
    leave(guard)
    tried(guard, -0.5)
    assert decide(guard, 1.5) == "speculate"


def test_what_drafting_is_expected_to_give_ends_it_and_what_may_be_hoped_for_does_not_lead_back() -> None:
    """Where drafting is seen, hope has had its chance."""
    guard = PlainGuard(only_by_trial=True)
    assert decide(guard, 1.2, 1.01) == "speculate"
    assert decide(guard, 1.2, 0.4) != "speculate"
    for _ in range(100):
        mode = decide(guard, 1.2, 0.99)
        assert mode != "speculate"
        if mode == "probe_draft":
            guard.tried(0.3, good=False, hit=True)


def speculates(guard: PlainGuard, known: float, most: int = 4000) -> int:
    """Steps on end from now on, if so much is expected of them."""
    return next((n for n in range(most) if decide(guard, known) not in ("speculate", "probe_plain")), most)


@pytest.mark.parametrize(("known", "steps"), [(0.98, 55), (0.94, 10), (0.49, 1)])
def test_a_little_may_be_lost_before_drafting_is_left(known: float, steps: int) -> None:
    """Beliefs err, and to leave and to come back costs as well; but only so much: half a step, saved up over 500, and a
    hundredth of every step, as plain decoding with its trials costs that."""
    guard = PlainGuard(only_by_trial=True)
    assert speculates(guard, 1.2, 100) == 100
    assert speculates(guard, known) == pytest.approx(steps, abs=1)
    for wait, share in ((0, 0.0), (250, 0.5)):
        for _ in range(wait):
            decide(guard, 0.5)
        tried(guard, -1.0, good=True)
        assert decide(guard, 1.2) == "speculate"
        assert speculates(guard, known) <= share * steps + 0.08 / (0.99 - known) + 1  # 80 steps until the next trial


def test_what_was_lost_beyond_that_is_not_held_against_drafting_for_long() -> None:
    guard = PlainGuard(only_by_trial=True)
    assert speculates(guard, 0.0) == 0
    for _ in range(500):
        decide(guard, 0.5)
    tried(guard, -1.0, good=True)
    assert decide(guard, 1.2) == "speculate"
    assert speculates(guard, 0.98) == pytest.approx(55, abs=1)


def test_a_trial_of_which_nothing_was_accepted_does_not_lead_back_to_drafting() -> None:
    """Whatever is believed."""
    modes = []
    for hit in (True, False):
        guard = PlainGuard(only_by_trial=True)
        leave(guard)
        tried(guard, 0.5, hit=hit)
        modes.append(decide(guard, 0.5, 1.5))
    assert modes == ["speculate", "plain"]


def test_who_can_be_tried_at_little_cost_is_before_anything_is_drafted() -> None:
    guard = PlainGuard(only_by_trial=True, tries_first=True)
    assert decide(guard, 2.0) == "probe_draft"
    guard.tried(-0.5, good=True, hit=True)
    assert decide(guard, 2.0) == "speculate"
    guard, lost = PlainGuard(only_by_trial=True, tries_first=True), 0.0
    for _ in range(100):
        mode = guard.decide(2.0, 2.0, 1.0, 1, 3.0, 0.5)
        assert mode != "speculate"
        if mode == "probe_draft":
            guard.tried(0.5, good=False, hit=False)
            lost += 0.9
    assert 1.0 < lost < 3.0


def test_plain_decoding_is_tried_ever_more_rarely_until_the_load_changes() -> None:
    guard = PlainGuard()
    modes = [guard.decide(1.1, 1.1, 1.0, 1) for _ in range(4000)]
    started = [n for n, (before, mode) in enumerate(pairwise(modes)) if mode == "probe_plain" != before]
    gaps = np.diff(started)
    assert (gaps[1:] >= gaps[:-1]).all()
    assert gaps[-1] == 1024 > 2 * gaps[0]
    modes = [guard.decide(1.1, 1.1, 1.0, 4) for _ in range(400)]
    assert "probe_plain" in modes


def test_under_another_load_a_promise_leads_back_to_drafting() -> None:
    """Who has decoded plainly for long did so because there were many requests."""
    guard = PlainGuard(only_by_trial=True)
    leave(guard, load=16)
    for _ in range(40):
        assert guard.decide(0.97, 0.97, 1.0, 16) != "speculate"
    assert guard.decide(1.3, 1.3, 1.0, 15) != "speculate"
    assert [guard.decide(1.3, 1.3, 1.0, 4) for _ in range(9)][-1] == "speculate"
    leave(guard, load=4)
    assert guard.decide(1.3, 1.3, 1.0, 4) != "speculate"


def test_a_dear_trial_leads_back_to_drafting_where_what_it_taught_promises_more() -> None:
    guard = PlainGuard(only_by_trial=True)
    leave(guard)
    assert decide(guard, 0.5, 1.5) != "speculate"  # by hearsay
    tried(guard, 0.8)
    assert decide(guard, 0.5, 1.0) != "speculate"
    assert decide(guard, 0.5, 1.5) != "speculate"  # taught a step too early
    tried(guard, 0.8)
    assert decide(guard, 1.2, 1.05) == "speculate"


def test_a_trial_of_plain_decoding_counts_for_more_than_a_step_of_it() -> None:
    """There are few of them, and they alone tell what plain decoding takes when it goes on."""
    values = []
    for trial in (False, True):
        guard = PlainGuard()
        for _ in range(6):
            guard.observe(Prediction(False, 1.0, 1.0), 1, 0.8, trial=trial)
        values.append(guard.plain.value)
    assert 1.0 < values[0] < values[1] < 1.25


def test_what_steps_really_gave_corrects_the_prediction() -> None:
    guard = PlainGuard()
    for _ in range(300):
        guard.observe(Prediction(True, 3.0, 1.0), 2, 1.0)
    assert guard.speculation.value == pytest.approx(2 / 3, rel=0.1)
    leave(guard)
    assert decide(guard, 1.3) == "plain"
    for _ in range(16_000):
        guard.observe(Prediction(False, 1.0, 1.0), 1, 1.0)
    assert guard.speculation.value == pytest.approx(1.0, rel=0.02)


def test_what_drafts_give_is_held_against_what_was_planned_for_each_load_apart() -> None:
    """Rules that end drafts early make more of long ones than of short ones."""
    guard = PlainGuard()

    def steps(load: int, given: float) -> None:
        for _ in range(400):
            guard.decide(2.0 * load, 2.0 * load, float(load), load)
            guard.observe(Prediction(True, 10.0, 1.0), round(10 * given), 1.0)

    steps(1, 1.2)
    at_one = guard.speculation.value
    assert at_one == pytest.approx(1.2, rel=0.05)
    for _ in range(10):
        guard.decide(8.0, 8.0, 4.0, 4)
    assert guard.speculation.value == at_one  # nothing else is known
    steps(4, 0.9)
    assert guard.speculation.value < 1.0
    for _ in range(10):
        guard.decide(2.0, 2.0, 1.0, 1)
    assert guard.speculation.value == at_one


def test_a_ratio_is_tokens_a_second_measured_over_predicted() -> None:
    ratio = Ratio()
    assert ratio.value == 1.0
    for _ in range(4000):
        ratio.observe(2.0, 0.5, 4.0, 0.5)
    assert ratio.value == pytest.approx(0.5, rel=0.01)
    for _ in range(4000):
        ratio.observe(4.0, 0.75, 4.0, 0.5)
    assert ratio.value == pytest.approx(2 / 3, rel=0.01)
    for _ in range(16000):
        ratio.rest()
    assert ratio.value == pytest.approx(1.0, rel=0.01)


def test_a_step_that_was_disturbed_counts_as_twice_as_long_only() -> None:
    slow, stuck = Ratio(), Ratio()
    slow.observe(1.0, 2.0, 1.0, 1.0)
    stuck.observe(1.0, 500.0, 1.0, 1.0)
    assert slow.value == stuck.value < 1.0


def test_steps_of_all_sizes_count_alike() -> None:
    small, large = Ratio(), Ratio()
    for _ in range(20):
        small.observe(1.0, 0.01, 2.0, 0.01)
        large.observe(50.0, 3.0, 100.0, 3.0)
    assert small.value == pytest.approx(large.value)


@pytest.mark.parametrize("advantage", [0.5, 0.98, 1.03, 1.3, 3.0])
def test_steps_without_a_decision_are_those_that_it_would_not_change(advantage: float) -> None:
    """In any mode and with any debt, decisions that are left out where ``calm`` allows it would have been the same."""

    def modes(*, holds: bool) -> list[Mode]:
        guard = PlainGuard(only_by_trial=True)
        made: list[Mode] = []
        for step in range(3000):
            hoped = 0.5 if step == 0 else advantage
            made.append(guard.hold() if holds and guard.calm and step > 1 else decide(guard, hoped))
            if made[-1] == "probe_draft":
                guard.tried(0.7, good=False, hit=True)
        return made

    assert modes(holds=True) == modes(holds=False)


def test_what_is_only_expected_of_look_ups_pays_for_asking_them_and_no_more() -> None:
    """In plain decoding afterwards they may not lose what they were only expected to gain."""
    guards = [PlainGuard(only_by_trial=True) for _ in range(2)]
    for guard in guards:
        guard.looked_up(0.05)
    for _ in range(50):
        guards[0].expects_of_look_ups(1.0)
    assert guards[0].affords_look_ups
    assert not guards[1].affords_look_ups
    guards[0].looked_up(0.11)
    assert not guards[0].affords_look_ups


def test_look_ups_are_paid_for_by_steps_without_a_decision_too() -> None:
    guard = PlainGuard(only_by_trial=True)
    for _ in range(2):
        decide(guard, 0.5)
    guard.looked_up(0.05)
    assert not guard.affords_look_ups
    while guard.calm:
        guard.hold()
    for _ in range(8):
        if not guard.affords_look_ups:
            decide(guard, 0.5)
            while guard.calm:
                guard.hold()
    assert guard.affords_look_ups


def test_a_machine_that_becomes_slow_while_decoding_plainly_does_not_speak_for_drafting() -> None:
    guard = PlainGuard(only_by_trial=True)
    for _ in range(40):
        decide(guard, 0.5)
        guard.observe(Prediction(False, 1.0, 0.01), 1, 0.013)
    assert guard.plain.value < 0.9
    assert guard.favour == 1.0
    assert {decide(guard, 0.99) for _ in range(8)} == {"plain"}
    guard.tried(-1.0, good=True, hit=True)  # drafting is taken up: the machine may be as fast again
    assert decide(guard, 1.1) == "speculate"
    assert guard.plain.value == 1.0


def test_plain_decoding_that_is_faster_than_predicted_is_so_when_drafting_is_taken_up() -> None:
    guard = PlainGuard(only_by_trial=True)
    for _ in range(80):
        decide(guard, 0.5)
        guard.observe(Prediction(False, 1.0, 0.01), 1, 0.008)
    guard.tried(-1.0, good=True, hit=True)
    assert decide(guard, 1.5) == "speculate"
    assert guard.plain.value > 1.1


def test_plain_decoding_that_is_slower_than_predicted_speaks_for_drafting_that_goes_on() -> None:
    guard = PlainGuard(only_by_trial=True)
    assert decide(guard, 1.5) == "speculate"
    for _ in range(8):
        guard.observe(Prediction(False, 1.0, 0.01), 1, 0.013, trial=True)
    assert guard.favour > 1.1


def test_a_slow_moment_says_little_of_drafting() -> None:
    """Or it would end it, and what trials teach would be held against it for long."""
    guard = PlainGuard(only_by_trial=True)
    for seconds, steps in ((0.01, 400), (0.012, 30)):
        for _ in range(steps):
            decide(guard, 1.5)
            guard.observe(Prediction(True, 1.0, 0.01), 1, seconds)
    assert 0.98 < guard.favour < 1.0


def test_what_a_slow_start_said_of_drafting_is_half_forgotten_after_two_thousand_steps() -> None:
    guard = PlainGuard(only_by_trial=True)
    for _ in range(60):
        decide(guard, 1.5)
        guard.observe(Prediction(True, 1.0, 0.01), 1, 0.012)
    against = 1.0 - guard.favour
    assert against > 0.05
    for _ in range(2000):
        decide(guard, 0.9)
        guard.observe(Prediction(False, 1.0, 0.01), 1, 0.01)
    assert 1.0 - guard.favour < 0.55 * against


def test_what_the_very_first_trial_took_is_not_held_against_the_next() -> None:
    """All of it is cold: a step and a half, of two that are saved."""
    waits = []
    for tries_first in (True, False):
        guard = PlainGuard(only_by_trial=True, tries_first=tries_first)
        if not tries_first:
            leave(guard)
            guard._allowance = 2.0
        while decide(guard, 0.9) != "probe_draft":
            pass
        guard.tried(1.5, good=False, hit=False)
        waits.append(next(n for n in range(400) if decide(guard, 0.9) == "probe_draft"))
    assert waits[0] < 8
    assert waits[1] > 20
