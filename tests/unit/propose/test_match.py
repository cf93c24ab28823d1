from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.propose.match import longest_match


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
@settings(deadline=None, max_examples=300)
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
