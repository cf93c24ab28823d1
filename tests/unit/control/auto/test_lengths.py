"""How long drafts are and how much of them is verified, given what a token is worth and what everything costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.control.auto.acceptance import logit, logits
from dynaspec.control.auto.lengths import (
    admit_by_survival,
    chain_depths,
    expected_tokens,
    hopeful,
    lookup_depths,
    match_features,
    merge_depths,
    stop_thresholds,
    survivals,
)
from dynaspec.control.auto.parts import BOUNDS

FLAT = np.array([2e-3, *np.zeros(BOUNDS.size), 0.0, 0.0])
"""A target pass that takes 2 ms whatever it does; …"""
STEEP = np.array([1e-3, *np.full(BOUNDS.size, 1e-3), 0.0, 0.0])
"""… 1 ms a row; …"""
STEP = np.array([1e-3, *np.where(BOUNDS < 8, 0.0, 1e-3), 0.0])
"""… 1 ms a row from the ninth on; …"""
TILE = np.array([1e-3, *np.where(BOUNDS == 14, 1e-3, 2e-4), 0.0, 0.0])
"""… rows 15 and 16 take 1 ms, all others 0.2."""


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def chain(
    chances: Sequence[float] = (0.8,),
    draft: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
    value: float = 1e-3,
    *,
    cap: Sequence[int] = (8,),
    lens: Sequence[int] | None = None,
    offsets: Sequence[float] | None = None,
    lag: Sequence[int] | None = None,
    room: Sequence[int] | None = None,
    context: Sequence[int] | None = None,
    variance: float = 0.0,
    optimism: float = 0.0,
    single_pass: bool = False,
    target: np.ndarray = FLAT,
    base_rows: float | None = None,
) -> tuple[list[int], list[float], tuple[float, ...]]:
    """Lengths, worth and sums. ``chances`` by position; the last one goes on. Drafts spare the caches."""
    size = len(cap)
    bias = np.array([logit(chances[min(j, len(chances) - 1)]) for j in range(8)])
    runnable = np.isin(np.arange(max(cap) + 1), range(max(cap) + 1) if lens is None else lens)
    depth, worth = np.empty(size, np.int64), np.empty(size)
    sums = chain_depths(
        bias,
        np.full(8, variance),
        optimism,
        np.array([0.0] * size if offsets is None else offsets, dtype=np.float64),
        np.arange(size),
        column(*cap),
        runnable,
        column(*([0] * size if lag is None else lag)),
        column(*([1000] * size if room is None else room)),
        32.0,
        column(*([0] * size if context is None else context)),
        value,
        np.array([*draft, 0.0], dtype=np.float64),
        single_pass,
        target,
        float(size) if base_rows is None else base_rows,
        depth,
        worth,
    )
    return depth.tolist(), worth.tolist(), sums


def lengths(chance: float, pass_s: float, requests: int = 1) -> list[int]:
    return chain([chance], [0.0, pass_s, 0.0, 0.0], cap=[8] * requests)[0]


# --- a pass a token -----------------------------------------------------------------------------------------------


def test_a_draft_goes_on_as_long_as_the_next_token_pays_for_its_pass() -> None:
    # Survival 0.8, 0.64, 0.51, 0.41, …: with a token worth 1 ms, passes of 0.45 ms pay three times.
    assert lengths(0.8, 0.45e-3) == [3]
    assert lengths(0.8, 0.85e-3) == [0]
    assert lengths(0.8, 0.0) == [8]


def test_several_requests_share_the_price_of_a_pass() -> None:
    assert lengths(0.5, 0.9e-3, requests=1) == [0]
    assert lengths(0.5, 0.9e-3, requests=4) == [2, 2, 2, 2]


def test_a_draft_must_earn_what_its_start_takes() -> None:
    # Three slots bring 0.35 + 0.19 + 0.06 ms beyond their passes.
    assert chain([0.8], [0.59e-3, 0.45e-3, 0, 0])[0] == [3]
    assert chain([0.8], [0.61e-3, 0.45e-3, 0, 0])[0] == [0]


def test_every_request_pays_for_its_own_rows() -> None:
    # A slot of the second request is worth less than its row from its second token on.
    depth, _, _ = chain([0.8], [0, 1e-6, 0.4e-3, 0], cap=[8, 8], offsets=[0.0, logit(0.5) - logit(0.8)])
    assert depth == [4, 1]
    assert chain([0.8], [0, 1e-6, 0.4e-3, 0], cap=[2, 0])[0] == [2, 0]


def test_rows_that_make_the_target_dearer_are_fewer() -> None:
    # 7 rows without drafts: one more is free, from the ninth on a row takes 1 ms.
    free, dear = (chain([0.9], [0, 1e-6, 0, 0], target=STEP, base_rows=base)[0][0] for base in (7.0, 12.0))
    assert free > 0
    assert dear == 0


def test_rows_that_see_much_are_dearer() -> None:
    target = FLAT.copy()
    target[-1] = 1e-6
    assert chain([0.8, 0.5], [0, 1e-6, 0, 0], cap=[8, 8], context=[0, 500], target=target)[0] == [8, 1]
    assert chain([0.8], [0, 1e-6, 0, 0], cap=[8, 8], context=[0, 900], target=target)[0] == [8, 0]


def test_what_must_be_read_in_is_paid_off_over_the_steps_that_are_left() -> None:
    draft, cap = [0, 1e-6, 0, 1e-5], [1, 1, 1]
    # 3000 tokens take 30 ms. Over 32 steps that is less than 0.8 ms a step; a request that ends soon cannot earn it.
    assert chain([0.8], draft, cap=cap, lag=[0, 2000, 3000])[0] == [1, 1, 0]
    assert chain([0.8], draft, cap=cap, lag=[2000] * 3, room=[1000, 10, 1])[0] == [1, 0, 0]


def test_one_pass_for_all_tokens_is_paid_once() -> None:
    each, once = (chain([0.8], [0, 0.5e-3, 0.2e-3, 0], single_pass=single) for single in (False, True))
    assert each[0] == [1]  # 0.8 pays 0.7 ms, 0.64 does not
    assert once[0] == [7]  # 0.8⁷ = 0.21
    assert once[2][2] == pytest.approx(0.5e-3 + 7 * 0.2e-3)


def test_sums_are_those_of_the_lengths() -> None:
    draft, context = [1e-5, 2e-5, 3e-6, 1e-6], [100, 200]
    depth, worth, sums = chain(
        *([0.8, 0.6], draft),
        cap=[3, 2],
        lag=[0, 40],
        context=context,
        offsets=[0.0, 0.4],
        variance=0.2,
        optimism=1.0,
    )
    hoped, expected, seconds, rows, seen = sums
    assert depth == [3, 2]
    bias, offset = np.array([logit(0.8), *[logit(0.6)] * 7]), np.array([0.0, 0.4])
    places = np.arange(2)
    assert expected == pytest.approx(expected_tokens(bias, offset, places, column(*depth)))
    better = hopeful(bias, np.full(8, 0.2), 1.0)
    assert hoped == pytest.approx(expected_tokens(better, offset, places, column(*depth)))
    assert hoped > expected
    assert (rows, seen) == (5.0, 3 * 100 + 2 * 200)
    assert seconds == pytest.approx(1e-5 + 3 * 2e-5 + 5 * 3e-6 + 40 * 1e-6 / 32)
    assert min(worth) > 0.0


def test_hope_drafts_where_little_is_known() -> None:
    sure, unsure = (chain([0.5], [0, 0.6e-3, 0, 0], variance=variance, optimism=1.0) for variance in (0.0, 1.0))
    assert sure[0] == [0]
    assert unsure[0] != [0]
    assert unsure[2][1] < unsure[2][0]


# --- where few lengths can run ------------------------------------------------------------------------------------


def test_a_request_is_not_dropped_at_a_length_that_cannot_run() -> None:
    """Its second token does not pay for its row, but 2 is no length: what three bring together decides."""
    chances = [0.9, 0.5, 0.99, 0.01]
    # 0.9, 0.45 and 0.4455 ms for rows of 0.46 ms.
    draft = [0, 1e-6, 0.46e-3, 0]
    assert chain(chances, draft)[0] == [1]
    assert chain(chances, draft, lens=[0, 3])[0] == [3]
    assert chain(chances, draft, lens=[0, 1, 3])[0] == [1]


def test_one_that_does_not_pay_as_far_as_it_must_go_is_left_out() -> None:
    assert chain([0.5], [0, 1e-6, 0.3e-3, 0], cap=[4, 4], lens=[0, 4], offsets=[0.0, 3.0])[0] == [0, 4]


def test_who_pays_for_the_passes_of_others_takes_part_in_them() -> None:
    """The second's only token does not pay for the draft's start by itself, but with the first's two."""
    chances, draft = [0.9, 0.9, 0.05], [0.9e-3, 1e-6, 0.3e-3, 0]
    assert chain(chances, draft, cap=[4, 4], offsets=[0.0, -2.1])[0] == [2, 1]
    assert chain(chances, draft, cap=[4, 0], offsets=[0.0, -2.1])[0] == [2, 0]


@given(
    st.lists(st.floats(0.05, 0.95), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 5), st.floats(-2, 2)), min_size=1, max_size=4),
    st.sets(st.integers(1, 5), min_size=1),
    st.tuples(st.floats(0, 5e-4), st.floats(0, 5e-4), st.floats(0, 5e-4), st.just(0.0)),
)
@settings(max_examples=150, deadline=None)
def test_lengths_can_run_and_bring_something(
    chances: list[float],
    requests: list[tuple[int, float]],
    lens: set[int],
    draft: tuple[float, float, float, float],
) -> None:
    cap, offsets = [n for n, _ in requests], [x for _, x in requests]
    depth, worth, (hoped, expected, seconds, rows, _) = chain(chances, draft, cap=cap, offsets=offsets, lens=[0, *lens])
    assert all(n in {0, *lens} and n <= most for n, most in zip(depth, cap, strict=True))
    assert rows == sum(depth)
    assert hoped == pytest.approx(expected)
    # Less would be no better: what is expected is worth more than it takes.
    assert hoped * 1e-3 >= seconds * (1 - 1e-9)
    assert any(depth) == (hoped > 0.0)
    assert len(worth) == len(cap)


# --- look-ups -----------------------------------------------------------------------------------------------------


def offered(*matches: int) -> np.ndarray:
    return np.array([(match, 8) for match in matches])


def test_lookups_end_where_a_row_costs_more_than_it_brings() -> None:
    depth, worth = np.empty(2, np.int64), np.empty(2)
    bias, zero, places = np.zeros(8), np.zeros(2), np.arange(2)
    tokens, expected, rows, seen = lookup_depths(
        *(0.0, bias, np.zeros(8), 0.0, zero, places, offered(2, 2)),
        *(column(8, 0), column(7, 9), 10e-3, zero, STEEP, 2.0, depth, worth),
    )
    assert depth.tolist() == [3, 0]  # 5, 2.5, 1.25, 0.625 ms for 1 ms each
    assert worth.tolist() == pytest.approx([5.75e-3, 0.0])
    assert (tokens, expected) == pytest.approx((0.875, 0.875))
    assert (rows, seen) == (3.0, 21.0)
    assert expected_tokens(bias, zero, places, depth) == pytest.approx(0.875)


def test_lookups_with_better_matches_or_less_context_go_further() -> None:
    target = STEEP.copy()
    target[-1] = 1e-5
    depth, worth = np.empty(3, np.int64), np.empty(3)
    lookup_depths(
        *(1.0, np.full(8, -1.0), np.zeros(8), 0.0, np.zeros(3), np.arange(3), offered(2, 16, 2)),
        *(column(8, 8, 8), column(0, 0, 450), 10e-3, np.zeros(3), target, 3.0, depth, worth),
    )
    assert depth[1] > depth[0] > depth[2] == 0


def test_hope_looks_further_than_the_estimate() -> None:
    found = []
    for optimism in (0.0, 1.0):
        depth, worth = np.empty(1, np.int64), np.empty(1)
        sums = lookup_depths(
            *(0.0, np.zeros(8), np.ones(8), optimism, np.zeros(1), np.arange(1), offered(2)),
            *(column(8), column(0), 3e-3, np.zeros(1), STEEP, 1.0, depth, worth),
        )
        found.append((int(depth[0]), sums[0], sums[1]))
    assert found[0][0] == 1
    assert found[0][1] == found[0][2] == pytest.approx(0.5)
    assert found[1][0] > 1
    assert found[1][1] > found[1][2]


def test_what_is_expected_is_the_sum_of_survivals() -> None:
    bias, offsets = np.linspace(1.0, -1.0, 8), np.array([0.3, -0.2, 9.0])
    places, depth = column(1, 0), column(10, 3)
    total = 0.0
    for place, n in zip(places, depth, strict=True):
        scores = np.array([bias[min(j, 7)] + offsets[place] for j in range(n)])
        total += float(np.cumprod(1 / (1 + np.exp(-scores))).sum())
    assert expected_tokens(bias, offsets, places, depth) == pytest.approx(total)


def test_lookups_give_way_to_what_brings_more() -> None:
    depth, worth = np.empty(3, np.int64), np.empty(3)
    sums = lookup_depths(
        *(1.0, np.zeros(8), np.zeros(8), 0.0, np.zeros(3), np.arange(3), offered(4, 4, 4)),
        *(column(3, 3, 3), column(5, 5, 5), 10e-3, np.array([0.0, 1.0, 2e-3]), STEEP, 3.0, depth, worth),
    )
    assert depth[0] == depth[2] == 3
    assert (depth[1], worth[1]) == (0, 0.0)
    assert sums[2:] == (6.0, 30.0)


def test_no_longer_than_what_is_on_offer() -> None:
    depth, worth = np.empty(3, np.int64), np.empty(3)
    lookup_depths(
        *(0.0, np.full(8, 9.0), np.zeros(8), 0.0, np.zeros(3), np.arange(3), np.array([(4, 3), (4, 8), (0, 8)])),
        *(column(8, 5, 8), column(1, 1, 1), 10e-3, np.zeros(3), STEEP, 3.0, depth, worth),
    )
    assert depth.tolist() == [3, 5, 0]


@pytest.mark.parametrize(
    ("found", "passes_s", "depth", "owner", "kept"),
    [
        # The model's 4 expected tokens are worth 4 ms less 4 rows of 0.1 ms, of which the rest has half.
        ((6, 0, 0), 1.7e-3, [6, 9, 9], [1, 0, 0], 0.5),
        ((6, 0, 0), 1.9e-3, [6, 0, 0], [1, 0, 0], 0.0),
        ((6, 5, 4), 0.0, [6, 5, 4], [1, 1, 1], 0.0),
    ],
)
def test_the_model_drafts_for_the_rest_if_its_passes_pay(
    found: tuple[int, ...], passes_s: float, depth: list[int], owner: list[int], kept: float
) -> None:
    lens, who = column(*found), column(0, 0, 0)
    agreed, granted, parts = column(4, 2, 2), column(9, 9, 9), np.array([4.0, 4.0, passes_s])
    count, left = merge_depths(lens, 1, agreed, granted, 1e-3, 1e-4, parts, who)
    assert (lens.tolist(), who.tolist()) == (depth, owner)
    assert (count, left) == (sum(n > 0 for n in found), kept)


def test_beside_plain_decoding_only_look_ups_draft() -> None:
    lens, who = column(3, 0), column(0, 0)
    assert merge_depths(lens, 1, column(0, 0), column(9, 9), 1e-3, 1e-4, np.zeros(3), who) == (1, 0.0)
    assert lens.tolist() == [3, 0]


def test_every_token_found_makes_the_match_longer() -> None:
    features = match_features(column(2, 7), column(3, 2))
    assert features.tolist() == pytest.approx(np.log2([1.0, 1.5, 2.0, 3.5, 4.0]).tolist())


# --- ending drafts ------------------------------------------------------------------------------------------------


def test_thresholds_are_where_the_next_token_is_just_worth_its_row_and_its_pass() -> None:
    bias = np.array([logit(0.9), logit(0.5), logit(0.25), *[logit(0.1)] * 5])
    target = STEP.copy()
    target[-1] = 1e-6
    costs = 4e-3, np.array([0, 3e-4, 2e-5, 0, 0]), target, 20.0, column(100, 300), column(4, 2)
    below, total = stop_thresholds(bias, np.ones(8), 0.0, *costs)
    row = 2e-5 + 1e-3 + 1e-6 * 200
    assert below.tolist() == pytest.approx([row / (4e-3 * chance) for chance in (0.5, 0.25, 0.1)])
    assert total.tolist() == pytest.approx([3e-4 / (4e-3 * chance) for chance in (0.5, 0.25, 0.1)])
    hoped = [part.tolist() for part in stop_thresholds(bias, np.ones(8), 1.0, *costs)]
    sure = [part.tolist() for part in stop_thresholds(hopeful(bias, np.ones(8), 1.0), np.zeros(8), 1.0, *costs)]
    assert hoped == sure
    assert max(hoped[0]) < max(below)


def test_thresholds_price_the_rows_that_the_next_token_would_be() -> None:
    bias = np.full(8, logit(0.5))
    below, _ = stop_thresholds(bias, np.ones(8), 0.0, 4e-3, np.zeros(5), STEP, 4.0, column(0, 0, 0), column(4, 4, 4))
    # Second tokens make 8 to 10 of 7 rows, the last two of which take 1 ms; all further ones do.
    assert below.tolist() == pytest.approx([2 / 3 / 2, 1 / 2, 1 / 2])


# --- verifying ----------------------------------------------------------------------------------------------------


def admit(survival: Sequence[float], lens: Sequence[int], value: float, target: np.ndarray, **options: object) -> list:
    values = {"context": [0] * len(lens), "base_rows": float(len(lens)), "budget": 100} | options
    context = np.array(values["context"], dtype=np.int64)
    return admit_by_survival(
        np.array(survival), column(*lens), context, value, target, values["base_rows"], values["budget"]
    ).tolist()


def test_slots_are_admitted_by_survival_up_to_the_first_that_does_not_pay() -> None:
    survival, lens = [0.9, 0.55, 0.2, 0.8, 0.7], [3, 2]
    assert admit(survival, lens, 2e-3, STEEP) == [2, 2]  # 0.55 · 2 ms still pays for 1 ms, 0.2 · 2 ms does not
    assert admit(survival, lens, 2e-3, STEEP, budget=3) == [1, 2]
    assert admit(survival, lens, 2e-3, STEEP, budget=1) == [1, 0]
    assert admit(survival, lens, 2e-3, FLAT) == [3, 2]
    assert admit([], [0, 0], 2e-3, STEEP) == [0, 0]


def test_slots_of_long_contexts_must_be_worth_more() -> None:
    target = STEEP.copy()
    target[-1] = 1e-5
    assert admit([0.9, 0.9], [1, 1], 2e-3, target, context=[0, 100]) == [1, 0]
    assert admit([0.9, 0.9], [1, 1], 2e-3, target, context=[100, 50]) == [0, 1]


def test_rows_are_admitted_up_to_where_they_get_dear() -> None:
    assert admit([0.9, 0.8, 0.7], [1, 1, 1], 1e-3, STEP, base_rows=6.0) == [1, 1, 0]


def test_a_tile_that_is_begun_is_paid_for_by_all_that_fill_it() -> None:
    assert admit([0.7] * 8, [1] * 8, 1e-3, TILE, base_rows=8.0) == [1] * 8
    assert admit([0.7, *[0.1] * 7], [1] * 8, 1e-3, TILE, base_rows=14.0) == [1, *[0] * 7]  # by who may, not by who does
    assert admit([0.7], [1], 1e-3, TILE, base_rows=14.0) == [0]  # nobody else is there to fill it
    draft = [0.7, 0.6, 0.5, 0.4]
    assert admit(draft, [4], 1e-3, TILE, base_rows=14.0) == [0]  # what was drafted behind it does not count


def test_a_pass_of_all_is_paid_for_at_what_its_rows_take_on_average() -> None:
    depth, _, _ = chain([0.6, 0.1], cap=(8, 8, 8, 8), target=STEP, base_rows=6.0)
    assert depth == [1, 1, 1, 1]  # 6 to 10 rows take 2 ms, 0.5 each
    assert chain([0.45, 0.1], cap=(8, 8, 8, 8), target=STEP, base_rows=6.0)[0] == [0, 0, 0, 0]


@pytest.mark.parametrize("prices", [STEEP, TILE])
@given(
    confidence=st.lists(st.lists(st.floats(0.01, 0.99), min_size=0, max_size=6), min_size=1, max_size=5),
    changed=st.floats(0.01, 0.99),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_whether_a_slot_is_verified_does_not_depend_on_what_follows_it(
    prices: np.ndarray, confidence: list[list[float]], changed: float, data: st.DataObject
) -> None:
    context = [data.draw(st.integers(0, 100)) for _ in confidence]
    target = prices.copy()
    target[-1] = 1e-5

    def admitted(rows: list[list[float]]) -> list[int]:
        lens = np.array([len(row) for row in rows])
        flat = logits(np.array([c for row in rows for c in row]))
        survival = survivals(1.0, np.zeros(8), np.zeros(len(rows)), flat, np.zeros_like(flat), lens)
        value, base_rows = 2.5e-3 * target[1] / STEEP[1], 12.0
        return admit(survival.tolist(), lens.tolist(), value, target, context=context, base_rows=base_rows)

    before = admitted(confidence)
    request = data.draw(st.integers(0, len(confidence) - 1))
    if before[request] >= len(confidence[request]):
        return
    later = [list(row) for row in confidence]
    for slot in range(before[request] + 1, len(later[request])):
        later[request][slot] = changed
    assert admitted(later)[request] == before[request]
    # How far anybody drafts behind a slot says nothing about that slot either.
    cut = data.draw(st.integers(1, 6))
    assert admitted([row[:cut] for row in confidence]) == [min(depth, cut) for depth in before]


def test_survival_only_falls_along_a_draft() -> None:
    lens = np.array([4, 3])
    found = survivals(1.0, np.zeros(8), np.array([0.5, -0.5]), logits(np.linspace(0.3, 0.9, 7)), np.zeros(7), lens)
    assert (np.diff(found[:4]) < 0).all()
    assert (np.diff(found[4:]) < 0).all()


def test_survival_is_what_a_stop_rule_takes_it_to_be() -> None:
    bias, offset, evidence = np.linspace(0.5, -0.5, 8), np.array([0.5, -0.5]), np.array([1.0, -2.0, 7.0, 0.3, 0.1])
    found = survivals(0.8, bias, offset, evidence, np.zeros_like(evidence), column(3, 2))
    chances = 1 / (1 + np.exp(-(0.8 * evidence + bias[[0, 1, 2, 0, 1]] + offset[[0, 0, 0, 1, 1]])))
    assert found.tolist() == pytest.approx([*np.cumprod(chances[:3]), *np.cumprod(chances[3:])])


def test_what_a_token_brought_itself_counts_for_the_tokens_behind_it() -> None:
    feature, own = np.array([1.0, 2.0, 0.5]), np.array([0.0, 3.0, 0.0])
    found = survivals(1.0, np.zeros(8), np.zeros(1), feature, own, column(3))
    chance = 1 / (1 + np.exp(-np.array([1.0, 2.0 - 3.0, 2.0, 0.5])))
    assert found.tolist() == pytest.approx([chance[0], chance[0] * chance[1], chance[0] * chance[2] * chance[3]])
