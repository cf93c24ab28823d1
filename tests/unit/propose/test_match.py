from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.propose.drawing import ahead_on_device
from dynaspec.propose.ngram import REPEAT_MATCH, REPEAT_WEIGHT, ahead, gather_signal, longest_match, repeat_bonus


def oracle(text: list[int], min_n: int, max_n: int, wanted: int) -> tuple[int, int]:
    """Every earlier occurrence of every suffix, ranked by length, then tokens that follow, then recency."""
    found = [
        (n, min(len(text) - start, wanted), start)
        for n in range(min_n, max_n + 1)
        for start in range(n, len(text))
        if text[start - n : start] == text[len(text) - n :]
    ]
    n, _, start = max(found, default=(0, 0, len(text)))
    return n, start


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    min_n=st.integers(1, 3),
    more=st.integers(0, 3),
    wanted=st.integers(1, 8),
)
@settings(max_examples=300)
def test_the_best_match_is_found(text: list[int], min_n: int, more: int, wanted: int) -> None:
    tokens = np.array([*text, 7, 7, 7], dtype=np.int32)  # what lies behind the text is not read
    assert longest_match(tokens, len(text), min_n, min_n + more, wanted) == oracle(text, min_n, min_n + more, wanted)


def test_the_longest_match_wins_over_the_nearest() -> None:
    tokens = np.array([1, 2, 3, 9, 3, 8, 1, 2, 3], dtype=np.int32)
    assert longest_match(tokens, 9, 1, 3, 2) == (3, 3)
    assert longest_match(tokens, 9, 1, 1, 2) == (1, 5)


def test_among_equals_the_one_with_enough_to_offer_wins_and_then_the_most_recent() -> None:
    tokens = np.array([5, 1, 2, 5, 3, 4, 5, 5], dtype=np.int32)
    assert longest_match(tokens, 8, 1, 1, 1) == (1, 7)
    assert longest_match(tokens, 8, 1, 1, 3) == (1, 4)


def test_a_text_that_never_repeats_has_no_match() -> None:
    assert longest_match(np.arange(6, dtype=np.int32), 6, 1, 3, 4) == (0, 6)


def heard(text: list[int], token: int, max_n: int) -> float:
    """What ``repeat_bonus`` says of a text, drafted tokens too, and the next token, from its definition."""
    found = [
        (n, end)
        for n in range(1, max_n + 1)
        for end in range(n, len(text))
        if text[end - n : end] == text[len(text) - n :]
    ]
    n, end = max(found, default=(0, 0))
    return math.log2(1 + n) * (1 if n and text[end] == token else -1)


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=3),
    most=st.integers(1, 9),
    data=st.data(),
)
@settings(max_examples=300)
def test_an_echo_is_what_the_text_did_before(texts: list[list[int]], most: int, data: st.DataObject) -> None:
    size = len(texts)
    lanes = np.array(data.draw(st.permutations(range(size + 1))), dtype=np.int64)[:size]
    position = data.draw(st.integers(0, 5))
    column = st.lists(st.integers(0, 2), min_size=position + 1, max_size=position + 1)
    drafted = [data.draw(column) for _ in texts]
    requests = np.array(data.draw(st.permutations(range(size)))[: data.draw(st.integers(0, size))], dtype=np.int64)
    # Behind texts and drafts stands what would give other answers if it were read.
    tokens, drafts = np.full((size + 1, 26), 1, np.int32), np.full((size, 8), 1, np.int64)
    for i, text in enumerate(texts):
        tokens[lanes[i], : len(text)], drafts[i, : position + 1] = text, drafted[i]
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    lead, confidence = (
        np.array(data.draw(st.lists(st.floats(0, most, width=32), min_size=size, max_size=size)), np.float32)[
            : len(requests)
        ]
        for most in (9, 1)
    )
    signal, echoed = np.zeros(drafts.shape, np.float32), np.zeros(drafts.shape, np.float32)
    found = gather_signal(lead, confidence, tokens, lanes, lengths, drafts, requests, position, signal, echoed)

    def repeated(max_n: int) -> list[float]:
        return [heard([*texts[r], *drafted[r][:position]], drafted[r][position], max_n) for r in requests.tolist()]

    shorter = [repeat_bonus(tokens[lanes[r]], lengths[r], drafts[r], position, most) for r in requests.tolist()]
    assert shorter == pytest.approx(repeated(most), rel=1e-5, abs=1e-5)
    repeat_bonuses = repeated(REPEAT_MATCH)
    assert echoed[requests, position].tolist() == pytest.approx(
        [REPEAT_WEIGHT * e for e in repeat_bonuses], rel=1e-5, abs=1e-5
    )
    surest = [ahead(*pair) for pair in zip(lead.tolist(), confidence.tolist(), strict=True)]
    expected = [by + REPEAT_WEIGHT * e for by, e in zip(surest, repeat_bonuses, strict=True)]
    assert found.tolist() == signal[requests, position].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("lead", "confidence", "expected"),
    [
        (2.0, 0.5, 1.0),  # ahead of the second, but not of all others together
        (2.0, 1.0 / (1.0 + np.exp(-1.0)), 1.5),
        (9.0, 1.0, 6.0),
        (9.0, 0.0, 0.0),
        (0.0, 0.001, -3.0),
        (np.inf, 1.0, 6.0),
    ],
)
def test_ahead_is_the_mean_of_two_log_odds(lead: float, confidence: float, expected: float) -> None:
    assert ahead(lead, confidence) == pytest.approx(expected, abs=1e-9)
    on_device = ahead_on_device(torch.tensor([lead]), torch.tensor([confidence]))
    assert on_device.tolist() == pytest.approx([expected], abs=1e-5)


def one_echo(text: list[int], drafted: list[int], max_n: int = 8) -> float:
    return float(repeat_bonus(np.array(text, np.int32), len(text), np.array(drafted), len(drafted) - 1, max_n))


def test_an_echo_is_a_yes_a_no_or_nothing() -> None:
    assert one_echo([1, 2, 3, 4, 1, 2, 3], [4]) == 2.0  # three tokens before: log2(4)
    assert one_echo([1, 2, 3, 4, 1, 2, 3], [5]) == -2.0
    assert one_echo([1, 2, 3, 4, 1, 2, 3], [4], max_n=1) == 1.0
    assert one_echo([1, 2, 3], [1]) == 0.0


def test_of_equal_echoes_the_most_recent_counts_and_a_longer_one_more() -> None:
    assert one_echo([7, 1, 7, 2, 7], [2]) == 1.0
    assert one_echo([7, 1, 7, 2, 7], [1]) == -1.0
    assert one_echo([3, 7, 1, 7, 2, 3, 7], [1]) == pytest.approx(math.log2(3))


def test_a_draft_echoes_itself() -> None:
    assert one_echo([9], [5, 6, 5, 6]) == 1.0  # 5 6 5, then 6 again
    assert one_echo([9], [5, 6, 5, 7]) == -1.0
    assert one_echo([5, 6], [4, 5, 6, 4]) == pytest.approx(math.log2(3))  # the repeated part crosses into the draft
