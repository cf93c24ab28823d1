"""What ``auto`` takes steps to cost: where it begins, and how it follows measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.contract.costs import PassCosts
from dynaspec.control.auto.costs import Drafting, StepCosts
from dynaspec.control.auto.parts import BOUNDS, pass_s, row_s

CURVE = ((1, 2e-3), (8, 2.4e-3), (16, 3.6e-3), (32, 6.4e-3), (64, 12e-3))
DRAFTER = ((1, 5e-4), (4, 5.3e-4), (16, 6.5e-4))
MEASURED = PassCosts(CURVE, (DRAFTER,), first_s=(2e-4,), context_s=1e-9, read_s=4e-9)
UNKNOWN = PassCosts()
START, PASS, ROW, INGESTED, RELOAD = range(5)


def costs(measured: PassCosts = MEASURED, models: Sequence[bool] = (True,)) -> StepCosts:
    return StepCosts(measured, models)


def draft_s(found: StepCosts, passes: int, drawn: int, ingested: int = 0, proposer: int = 0) -> float:
    return float(found.drafters[proposer] @ [1.0, passes, drawn, ingested, 0.0])


def drafting(passes: int, rows: int, seconds: float, ingested: int = 0, proposer: int = 0) -> Drafting:
    return Drafting(proposer, passes, passes * rows, ingested, seconds)


# --- start-up -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "seconds"), [(1, 2e-3), (8, 2.4e-3), (16, 3.6e-3), (32, 6.4e-3), (64, 12e-3)])
def test_passes_begin_near_what_was_measured_at_start_up(rows: int, seconds: float) -> None:
    assert costs().pass_s(rows, 0.0, 0.0) == pytest.approx(seconds, rel=0.1)


def test_beyond_the_largest_pass_measured_it_goes_on_as_before() -> None:
    assert costs().pass_s(200, 0.0, 0.0) == pytest.approx(12e-3 + 136 * 0.175e-3, rel=0.1)


def test_drafting_begins_at_what_was_measured_at_start_up() -> None:
    found = costs()
    assert draft_s(found, 1, 1) == pytest.approx(5e-4 + 2e-4)  # a draft's first pass
    assert draft_s(found, 4, 4) == pytest.approx(4 * 5e-4 + 2e-4)
    assert draft_s(found, 3, 3 * 16) == pytest.approx(3 * 6.5e-4 + 2e-4)
    assert 0 < found.drafters[0][INGESTED] < found.drafters[0][ROW]
    assert found.drafters[0][RELOAD] == 0.0  # not measured: learnt


def test_what_a_measured_drafter_leaves_behind_takes_its_scale_from_the_target() -> None:
    """Where start-up could time the drafter alone, the target's price is a guess until its first pass."""
    found = costs(PassCosts((), (DRAFTER,), first_s=(2e-4,)))
    for _ in range(3):
        found.observe(4, 0, 0.0, 2e-3, None)
    before = draft_s(found, 1, 1)
    for _ in range(40):
        found.observe(4, 0, 0.0, 2.4e-3, drafting(3, 1, 1.7e-3))
    assert found.pass_s(4, 0.0, 0.0) == pytest.approx(2e-3, rel=0.25)
    assert 0.0 <= found.drafters[0][RELOAD] < 1e-3
    assert before == pytest.approx(7e-4, rel=0.1)


def test_context_begins_at_what_was_measured_at_start_up() -> None:
    found = costs()
    assert found.pass_s(8, 1e6, 0.0) - found.pass_s(8, 0.0, 0.0) == pytest.approx(1e-3)
    assert found.pass_s(8, 1e6, 1e6) - found.pass_s(8, 1e6, 0.0) == pytest.approx(4e-3)
    unknown = costs(PassCosts(CURVE))
    assert unknown.pass_s(8, 1e3, 1e3) > unknown.pass_s(8, 1e3, 0.0) > unknown.pass_s(8, 0.0, 0.0)


def test_more_rows_of_the_same_requests_read_no_more() -> None:
    """Rows of drafts see what is read anyway: they are not as dear as so many more requests."""
    found, requests, context = costs(), 4, 2048.0
    plain = found.pass_s(requests, requests * context, requests * context)
    drafts = found.pass_s(4 * requests, 4 * requests * context, requests * context)
    others = found.pass_s(4 * requests, 4 * requests * context, 4 * requests * context)
    assert plain < drafts < others
    assert others - drafts == pytest.approx(3 * requests * context * 4e-9)


@pytest.mark.parametrize("curve", [((1, 2e-3), (8, 1e-3)), ((4, 3e-3),), ((1, 5e-3), (2, 4e-3), (64, 4.5e-3))])
def test_measurements_that_fall_with_more_rows_make_nothing_free(curve: tuple[tuple[int, float], ...]) -> None:
    found = costs(PassCosts(curve, (curve,)))
    assert (found.target > 0).all()
    assert (found.drafters[0][:RELOAD] > 0).all()
    assert found.pass_s(64, 0.0, 0.0) > found.pass_s(1, 0.0, 0.0)


@given(st.floats(1, 3000), st.floats(0, 1e6), st.floats(0, 1e6))
@settings(max_examples=60, deadline=None)
def test_a_pass_is_the_sum_of_its_rows(rows: float, context: float, read: float) -> None:
    parts = np.array([2.0, *np.random.default_rng(0).uniform(0.1, 0.7, BOUNDS.size), 2e-3, 1e-3])
    edges = [*BOUNDS.tolist(), np.inf]
    slopes = sum(
        price * max(0.0, min(rows, high) - low)
        for price, (low, high) in zip(parts[1:-2].tolist(), pairwise(edges), strict=True)
    )
    assert pass_s(parts, rows, context, read) == pytest.approx(2.0 + slopes + 1e-3 * context + 2e-3 * read)
    if not any(rows < bound <= rows + 1 for bound in edges):
        assert row_s(parts, rows) == pytest.approx(pass_s(parts, rows + 1, 0.0, 0.0) - pass_s(parts, rows, 0.0, 0.0))


# --- learning -----------------------------------------------------------------------------------------------------


def test_follows_measured_passes_and_survives_disturbances() -> None:
    found, rng = costs(PassCosts(((1, 2e-3), (64, 2.5e-3)))), np.random.default_rng(0)
    for _ in range(800):
        rows = int(rng.choice([1, 8, 32, 64]))
        seconds = (1 + 0.1 * rows) * 1e-3 * (1 + 0.05 * rng.normal())
        found.observe(rows, 0, 0.0, seconds * (20 if rng.random() < 0.02 else 1), None)
    for rows in (1, 8, 32, 64):
        assert found.pass_s(rows, 0.0, 0.0) == pytest.approx((1 + 0.1 * rows) * 1e-3, rel=0.2)


@pytest.mark.parametrize("factor", [40.0, 100.0])
def test_a_start_that_was_measured_while_something_else_had_the_cores_is_forgotten(factor: float) -> None:
    slow = PassCosts(
        target=tuple((rows, factor * (1.1e-3 + 1.5e-4 * rows)) for rows in (1, 2, 4, 8, 16, 32)),
        drafters=(((1, factor * 2e-4), (16, factor * 5e-4)),),
    )
    found = costs(slow)
    for step in range(400):
        k = (3, 5, 0)[step % 3]
        found.observe(1 + k, 0, 0.0, 1.1e-3 + 1.5e-4 * (1 + k), drafting(k, 1, 2e-4 * k) if k else None)
    assert 0.0 < found.pace < 1.0
    for rows in (1, 4, 6):
        assert found.pass_s(rows, 0.0, 0.0) == pytest.approx(1.1e-3 + 1.5e-4 * rows, rel=0.3)


def test_one_pass_that_was_disturbed_changes_little() -> None:
    found = costs()
    for _ in range(100):
        found.observe(8, 0, 0.0, 2.4e-3, None)
    before = found.pass_s(8, 0.0, 0.0)
    found.observe(8, 0, 0.0, 10.0, None)
    assert before < found.pass_s(8, 0.0, 0.0) < 1.3 * before


def test_noise_of_single_passes_does_not_reach_the_slopes() -> None:
    found, rng, slopes = costs(), np.random.default_rng(1), []
    start = row_s(found.target, 20.0)
    for _ in range(400):
        rows = int(rng.integers(9, 32))
        found.observe(rows, 0, 0.0, costs().pass_s(rows, 0.0, 0.0) * (1 + 0.15 * rng.normal()), None)
        slopes.append(row_s(found.target, 20.0))
    assert np.mean(slopes) == pytest.approx(start, rel=0.15)
    assert np.std(slopes) < 0.1 * start


@pytest.mark.parametrize("factor", [0.75, 1.35])
def test_what_slows_everything_down_moves_all_parts_together(factor: float) -> None:
    """A slow minute of plain decoding must not make drafting look cheap."""
    found, rng = costs(), np.random.default_rng(2)
    before, drafting_before, row_before = found.pass_s(4, 0.0, 0.0), draft_s(found, 4, 16), row_s(found.target, 20.0)
    for step in range(300):
        found.observe(4, 0, 0.0, before, drafting(4, 4, drafting_before) if step % 5 == 0 else None)
    for _ in range(60):
        found.observe(4, 0, 0.0, factor * before * (1 + 0.03 * rng.normal()), None)
    assert found.pass_s(4, 0.0, 0.0) == pytest.approx(factor * before, rel=0.05)
    assert found.pace == pytest.approx(factor, rel=0.13)
    assert draft_s(found, 4, 16) == pytest.approx(factor * drafting_before, rel=0.13)
    assert row_s(found.target, 20.0) == pytest.approx(factor * row_before, rel=0.13)


def test_one_step_of_the_other_kind_now_and_then_keeps_the_two_comparable() -> None:
    """Drafting turns twice as expensive, the target's passes do not."""
    found = costs()
    truth, dearer = found.pass_s(4, 0.0, 0.0), 2.0 * draft_s(found, 4, 16)
    for step in range(1000):
        found.observe(4, 0, 0.0, truth, drafting(4, 4, dearer) if step % 10 == 0 else None)
    assert draft_s(found, 4, 16) == pytest.approx(dearer, rel=0.1)
    assert found.pass_s(4, 0.0, 0.0) == pytest.approx(truth, rel=0.1)


def test_tells_calls_passes_and_rows_apart() -> None:
    measured = PassCosts(((1, 2e-3), (64, 4e-3)), (((1, 3.5e-4), (16, 4.4e-4)),), first_s=(2e-4,))
    found, rng, truth = costs(measured), np.random.default_rng(0), np.array([4e-4, 3e-4, 1.2e-5, 9e-6])
    for _ in range(3000):
        passes, rows, late = int(rng.integers(1, 7)), int(rng.integers(1, 20)), int(rng.choice([0, 0, 200]))
        seconds = float(truth @ [1, passes, passes * rows, late]) * (1 + 0.03 * rng.normal())
        found.observe(rows, 0, 0.0, costs(measured).pass_s(rows, 0.0, 0.0), drafting(passes, rows, seconds, late))
    for passes, rows, late in ((1, 1, 0), (6, 1, 0), (6, 19, 0), (1, 19, 200)):
        expected = float(truth @ [1, passes, passes * rows, late])
        assert draft_s(found, passes, passes * rows, late) == pytest.approx(expected, rel=0.12)


def test_what_steps_of_one_kind_cannot_tell_apart_stays_as_it_was() -> None:
    found = costs()
    row = found.drafters[0][ROW] / found.drafters[0][PASS]
    dearer, rows = 1.5 * draft_s(found, 2, 2), row_s(found.target, 100.0) / found.target[0]
    for _ in range(300):
        found.observe(1, 0, 0.0, 2e-3, drafting(2, 1, dearer))
    assert draft_s(found, 2, 2) == pytest.approx(dearer, rel=0.05)
    assert found.drafters[0][ROW] / found.drafters[0][PASS] == pytest.approx(row, rel=0.6)
    assert row_s(found.target, 100.0) / found.target[0] == pytest.approx(rows, rel=0.3)


@pytest.mark.parametrize("share", [0.0, 0.15])
def test_what_a_draft_costs_the_pass_after_it_is_not_taken_for_the_price_of_plain_decoding(share: float) -> None:
    """The drafter has used the caches: a target pass takes longer in steps with drafts than in others."""
    found, rng = costs(), np.random.default_rng(5)
    plain = found.pass_s(4, 0.0, 0.0)
    for step in range(400):
        drafts = step % 100 >= 8
        rows = 12 if drafts else 4
        seconds = costs().pass_s(rows, 0.0, 0.0) + (share * plain if drafts else 0.0)
        found.observe(rows, 0, 0.0, seconds * (1 + 0.05 * rng.normal()), drafting(2, 4, 1.3e-3) if drafts else None)
    assert found.pass_s(4, 0.0, 0.0) == pytest.approx(plain, rel=0.06)
    assert 0.4 * share * plain <= found.drafters[0][RELOAD] <= 1.2 * share * plain + 0.02 * plain


def test_learns_what_context_takes() -> None:
    found, rng = costs(), np.random.default_rng(3)
    for _ in range(1500):
        requests, rows_each, context = int(rng.integers(1, 9)), int(rng.integers(1, 6)), int(rng.integers(100, 100_000))
        rows, read = requests * rows_each, requests * context
        seconds = costs().pass_s(rows, 2.0 * rows_each * read, 1.5 * read)
        found.observe(rows, rows_each * read, read, seconds, None)
    seen, per_request = found.target[-1], found.target[-2]
    assert 2 * seen + per_request == pytest.approx(2 * 2e-9 + 6e-9, rel=0.1)  # at two rows a request
    assert (seen, per_request) == (pytest.approx(2e-9, rel=0.2), pytest.approx(6e-9, rel=0.2))


def test_proposers_are_told_apart() -> None:
    found = costs(PassCosts(CURVE, (DRAFTER, DRAFTER)), (True, True))
    before = draft_s(found, 4, 4)
    for _ in range(300):
        for proposer, factor in ((0, 1.0), (1, 1.6)):
            found.observe(4, 0, 0.0, 2.1714e-3, drafting(4, 1, factor * before, proposer=proposer))
    assert draft_s(found, 4, 4, proposer=1) / draft_s(found, 4, 4) == pytest.approx(1.6, rel=0.1)


# --- nothing measured at start-up ---------------------------------------------------------------------------------


def test_an_unknown_start_takes_its_scale_from_the_first_measurement() -> None:
    found = costs(UNKNOWN)
    found.observe(4, 0, 0.0, 0.05, drafting(3, 4, 9.0))  # the first draft loads what it needs
    found.observe(4, 0, 0.0, 0.05, drafting(3, 4, 0.02))
    assert found.pass_s(4, 0.0, 0.0) == pytest.approx(0.05)
    assert draft_s(found, 3, 12) == pytest.approx(0.02)
    assert found.pass_s(5, 0.0, 0.0) > found.pass_s(4, 0.0, 0.0)
    assert found.pace == pytest.approx(1.0)


def test_the_first_draft_of_a_proposer_is_no_measure() -> None:
    for measured in (MEASURED, UNKNOWN):
        with_first, without = costs(measured), costs(measured)
        with_first.observe(4, 0, 0.0, 2.2e-3, drafting(3, 4, 5.0))
        without.observe(4, 0, 0.0, 2.2e-3, None)
        assert with_first.drafters[0].tolist() == without.drafters[0].tolist()
        assert with_first.target.tolist() == without.target.tolist()
        with_first.observe(4, 0, 0.0, 2.2e-3, drafting(3, 4, 4e-3))
        assert draft_s(with_first, 3, 12) > draft_s(without, 3, 12)


def test_a_guess_about_drafting_has_the_scale_of_what_is_known_of_the_target() -> None:
    found = costs(UNKNOWN, (True, False))
    before = [draft_s(found, 3, 3, proposer=i) / found.pass_s(1, 0.0, 0.0) for i in range(2)]
    found.observe(1, 0, 0.0, 0.05, None)
    assert [draft_s(found, 3, 3, proposer=i) / 0.05 for i in range(2)] == pytest.approx(before)
    assert 0 < before[0] < 1


def test_what_was_measured_keeps_its_scale() -> None:
    found = costs(PassCosts(CURVE))
    found.observe(1, 0, 0.0, 1.0, None)
    assert found.pass_s(1, 0.0, 0.0) < 4e-3  # disturbed, not a scale


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_where_only_the_drafter_was_measured_one_slow_pass_is_not_laid_upon_it_alone(scale: float) -> None:
    """What a draft leaves behind is then as uncertain, against the target's pass, as where both were measured."""
    plain = 2.2e-3 * scale
    moved = []
    for target in ((), tuple((rows, seconds * scale) for rows, seconds in CURVE)):
        found = costs(PassCosts(target, (DRAFTER,), first_s=(2e-4,)))
        draft = draft_s(found, 3, 3)
        for step in range(20):
            found.observe(4, 0, 0.0, plain, drafting(3, 1, draft) if step == 0 else None)
        assert draft_s(found, 3, 3) == pytest.approx(draft, rel=0.05)  # it keeps what was measured
        assert found.pass_s(4, 0.0, 0.0) == pytest.approx(plain, rel=0.02)
        found.observe(4, 0, 0.0, 1.5 * plain, drafting(3, 1, draft))
        moved.append(found.drafters[0][RELOAD] / plain)
    assert 0.05 < moved[0] < 0.3
    assert moved[0] == pytest.approx(moved[1], rel=0.25)


@pytest.mark.parametrize("seconds", [1e-5, 1e-3, 0.5])
def test_learns_all_costs_of_a_host_that_measured_nothing(seconds: float) -> None:
    found, rng = costs(UNKNOWN), np.random.default_rng(4)
    for _ in range(1500):
        rows, passes = int(rng.integers(1, 30)), int(rng.integers(1, 6))
        draft = seconds * (0.15 * passes + 0.004 * passes * rows)
        found.observe(rows, 0, 0.0, seconds * (1 + 0.05 * rows), drafting(passes, rows, draft))
    for rows, passes in ((2, 1), (8, 3), (25, 5)):
        assert found.pass_s(rows, 0.0, 0.0) == pytest.approx(seconds * (1 + 0.05 * rows), rel=0.1)
        expected = seconds * (0.15 * passes + 0.004 * passes * rows)
        assert draft_s(found, passes, passes * rows) == pytest.approx(expected, rel=0.15)


def test_a_lookup_costs_its_call_alone() -> None:
    found = costs(PassCosts(CURVE), (False,))
    for _ in range(50):
        found.observe(4, 0, 0.0, 2.17e-3, Drafting(0, 0, 0, 0, 3e-5))
    assert found.drafters[0].tolist() == pytest.approx([3e-5, 0, 0, 0, 0], rel=0.05)


# --- books --------------------------------------------------------------------------------------------------------


def test_growing_old_is_trusting_the_next_measurement_more() -> None:
    """Plain steps that are not timed tell nothing; after them a measurement counts for more."""
    moved = []
    for idle in (0, 400):
        found = costs()
        for _ in range(200):
            found.observe(4, 0, 0.0, costs().pass_s(4, 0.0, 0.0), None)
        for _ in range(idle):
            found.observe(4, 0, 0.0, 0.0, None)
        before = found.pass_s(4, 0.0, 0.0)
        found.observe(4, 0, 0.0, 1.3 * before, None)
        moved.append(found.pass_s(4, 0.0, 0.0) / before)
    assert 1.0 < moved[0] < moved[1] < 1.3


def test_steps_without_seconds_teach_nothing() -> None:
    found = costs()
    before = found.target.tolist(), found.drafters[0].tolist(), found.pace
    for _ in range(20):
        found.observe(4, 100, 25.0, 0.0, None)
        found.observe(0, 0, 0.0, 1.0, None)
        found.observe(4, 100, 25.0, 0.0, drafting(3, 4, 0.0))
    assert (found.target.tolist(), found.drafters[0].tolist(), found.pace) == before


def test_what_is_kept_elsewhere_follows() -> None:
    """Drafters hold on to their parts."""
    found = costs()
    target, drafter = found.target, found.drafters[0]
    for _ in range(50):
        found.observe(4, 0, 0.0, 5e-3, drafting(4, 4, 5e-3))
    assert pass_s(target, 4.0, 0.0, 0.0) == found.pass_s(4, 0.0, 0.0) == pytest.approx(5e-3, rel=0.2)
    assert drafter.tolist() == found.drafters[0].tolist()


duration = st.just(0.0) | st.floats(1e-7, 10.0)
steps = st.lists(
    st.tuples(
        *(st.integers(0, 3000), st.integers(0, 10**7), st.floats(0, 10**7), duration),
        st.none() | st.tuples(st.integers(1, 8), st.integers(1, 300), st.integers(0, 4000), duration),
    ),
    max_size=40,
)


@given(steps, st.sampled_from([UNKNOWN, MEASURED]))
@settings(max_examples=100, deadline=None)
def test_nothing_costs_less_than_nothing_and_more_rows_never_less(
    measured: list[tuple[int, int, float, float, tuple[int, int, int, float] | None]], start: PassCosts
) -> None:
    found = costs(start)
    for rows, context, read, seconds, drafted in measured:
        one = None if drafted is None else drafting(drafted[0], drafted[1], drafted[3], drafted[2])
        found.observe(rows, context, read, seconds, one)
        for parts in (found.target, *found.drafters):
            assert np.isfinite(parts).all()
            assert (parts >= 0.0).all()
    passes = [found.pass_s(rows, 0.0, 0.0) for rows in (1, 2, 8, 9, 33, 200, 3000)]
    assert min(passes) > 0.0
    assert passes == sorted(passes)
