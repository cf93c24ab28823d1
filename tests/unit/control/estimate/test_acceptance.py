"""What is learnt of drafts: how likely tokens are accepted, before and after the proposer has shown its signal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynaspec.contract.signals import flat, logit, logits, signal_of
from dynaspec.control.estimate.acceptance import POSITIONS, AcceptanceModel, RequestSlots
from dynaspec.control.estimate.settings import AutoSettings

K = 4


def taught(
    chance: float, steps: int, *, requests: int = 2, seed: int = 0, model: AcceptanceModel | None = None
) -> AcceptanceModel:
    """A model that has seen drafts of four tokens, each accepted with that chance."""
    fresh, model = model is None, model or AcceptanceModel(signal=False)
    if fresh:
        for slot in range(requests):
            model.admit(slot)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        right = rng.random((requests, K)) < chance
        accepted = np.where(right.all(axis=1), K, (~right).argmax(axis=1))
        tested = np.minimum(accepted + 1, K)
        model.observe(np.arange(requests), np.full(requests, K), tested, accepted, np.zeros(requests * K))
        model.pass_steps(1)
    return model


@pytest.mark.parametrize("chance", [0.05, 0.355, 0.75, 0.9])
def test_conditional_acceptance_is_learnt(chance: float) -> None:
    found = np.mean([[taught(chance, 300, seed=s).chance(j) for j in range(2)] for s in range(6)], axis=0)
    assert found == pytest.approx([chance, chance], abs=0.05)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.05, 0.95)])
def test_what_was_learnt_is_forgotten_where_outcomes_surprise(before: float, after: float) -> None:
    """Twelve steps of the opposite outweigh three hundred."""
    surprised = [taught(after, 12, seed=9, model=taught(before, 300, seed=s)).chance(0) for s in range(4)]
    assert np.mean(surprised) == pytest.approx(after, abs=0.3)


def test_what_is_not_tried_is_not_forgotten() -> None:
    model = taught(0.9, 200)
    before = model.chance(2)
    for _ in range(300):  # drafts of one token
        one = np.ones(1, dtype=np.int64)
        model.observe(np.zeros(1, dtype=np.int64), one, one, one, np.zeros(1))
    assert model.chance(2) == pytest.approx(before, abs=0.08)


def test_a_short_draft_is_no_miss_of_longer_ones() -> None:
    model = AcceptanceModel(signal=False)
    model.admit(0)
    one = np.ones(1, dtype=np.int64)
    for _ in range(100):
        model.observe(np.zeros(1, dtype=np.int64), one, one, one, np.zeros(1))
    assert model.chance(1) > 0.8


def test_a_signal_sharpens_and_its_absence_does_not_bias() -> None:
    """Tokens are right with the chance that the signal says; on average that is what is planned with."""
    rng, model = np.random.default_rng(1), AcceptanceModel()
    model.admit(0)
    chances = 1.0 / (1.0 + np.exp(-rng.normal(1.0, 2.0, 4000)))
    for chance in chances:
        right = int(rng.random() < chance)
        one, none = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        model.observe(none, one, one, one * right, logits(np.array([chance])))
    assert model.chance(0) == pytest.approx(chances.mean(), abs=0.08)
    slots, lens = np.zeros(2, dtype=np.int64), np.ones(2, dtype=np.int64)
    low, high = model.survival(slots, lens, 1, logits(np.array([0.2, 0.9])))[:, 0]
    assert (low, high) == pytest.approx((0.2, 0.9), abs=0.1)


def test_tokens_cut_for_their_signal_count_as_likely_as_that_made_them() -> None:
    """Else the trim would leave only good ones to learn from, and all drafts would look good."""
    rng, model = np.random.default_rng(2), AcceptanceModel()
    model.admit(0)
    chances = 1.0 / (1.0 + np.exp(-rng.normal(0.5, 2.0, 3000)))
    none, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    for chance in chances:
        right = int(rng.random() < chance)
        verified = one if chance > 0.6 else none
        model.observe(none, one, verified, verified * right, logits(np.array([chance])))
    assert model.chance(0) == pytest.approx(chances.mean(), abs=0.1)


def test_requests_differ_and_that_grows_old() -> None:
    model = AcceptanceModel(signal=False)
    model.admit(0)
    model.admit(1)
    four = np.full(2, K)
    for _ in range(20):
        model.observe(np.arange(2), four, np.array([K, 1]), np.array([K, 0]), np.zeros(2 * K))
    easy, hard = model.offsets(np.arange(2))
    assert easy > 0.5 > -0.5 > hard
    model.pass_steps(400)
    assert np.abs(model.offsets(np.arange(2))).max() < 0.05
    assert model.offsets(np.array([-1])).tolist() == [0.0]


def test_what_a_caller_expects_is_where_a_request_starts() -> None:
    model = taught(0.5, 100)
    model.admit(2, 0.95)
    assert model.survival(np.array([2]), np.array([1]), 1)[0, 0] > 0.75


def test_a_profile_is_believed_until_it_is_contradicted() -> None:
    model = AcceptanceModel(rates=(0.9, 0.72, 0.36), signal=False)
    assert [model.chance(j) for j in range(3)] == pytest.approx([0.9, 0.8, 0.5])
    assert model.chance(POSITIONS - 1) == pytest.approx(0.5)
    for slot in range(2):
        model.admit(slot)
    assert taught(0.0, 100, model=model).chance(0) < 0.2


def test_survival_falls_along_a_draft_and_ends_at_the_cap() -> None:
    survival = taught(0.8, 50).survival(np.arange(2), np.array([3, 1]), 5)
    assert (np.diff(survival, axis=1) <= 0).all()
    assert (survival > 0).sum(axis=1).tolist() == [3, 1]


def test_outcomes_of_requests_that_are_gone_teach_nothing() -> None:
    model = AcceptanceModel(signal=False)
    before = model.chance(0)
    model.observe(np.array([-1]), np.array([2]), np.array([1]), np.array([0]), np.zeros(2))
    assert model.chance(0) == before


def test_settings_are_of_one_model() -> None:
    quick = replace(AutoSettings(), memory=16.0)
    assert AcceptanceModel(quick).settings.memory == 16.0


def test_slots_are_handed_out_again() -> None:
    slots = RequestSlots()
    first = [slots.add("a"), slots.add("b")]
    assert slots.of(("a", "b", "c")).tolist() == [0, 1, -1] == [*first, -1]
    slots.release(["a", "never seen"])
    assert slots.of(("a", "b")).tolist() == [-1, 1]
    assert [slots.add("c"), slots.add("d")] == [0, 2]


def test_signals_are_read_off_columns() -> None:
    assert flat([(1.0, 2.0), (), (3.0,)], (2, 1, 1)).tolist() == [1.0, 2.0, 0.0, 3.0]
    assert signal_of([(5.0,)], [(0.5,)], (1,)).tolist() == [5.0]
    assert signal_of([], [(0.5,), ()], (1, 1)).tolist() == [0.0, 0.0]
    assert signal_of([], [(0.9,), (float("nan"),)], (1, 1)) == pytest.approx([logit(0.9), -6.0])
    assert logit(1.0) == pytest.approx(6.0)
