from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dynaspec.propose.suffix import ResponseCache


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def drafted(cache: ResponseCache, salt: str, *text: int) -> list[int]:
    found = cache.speculate(salt, tokens(*text), len(text), 8, 4.0, 0.1)
    return [] if found is None else found.tokens.tolist()


def test_an_answer_is_drafted_from_as_it_grows() -> None:
    cache = ResponseCache(8, 10, 1000)
    key = cache.start("")
    assert drafted(cache, "", 9, 1) == []
    cache.append(key, tokens(1, 2))
    assert drafted(cache, "", 9, 1) == [2]
    cache.append(key, tokens(3))
    assert drafted(cache, "", 9, 1) == [2, 3]
    assert (len(cache), cache.tokens) == (1, 3)


def test_salts_share_nothing() -> None:
    cache = ResponseCache(8, 10, 1000)
    cache.append(cache.start("a"), tokens(1, 2, 3))
    cache.append(cache.start("b"), tokens(1, 7, 8))
    assert drafted(cache, "a", 9, 1) == [2, 3]
    assert drafted(cache, "b", 9, 1) == [7, 8]
    assert drafted(cache, "", 9, 1) == drafted(cache, "c", 9, 1) == []


def test_the_oldest_answer_leaves_first_whosever_it_is() -> None:
    cache = ResponseCache(8, 2, 1000)
    first, second = cache.start("a"), cache.start("b")
    cache.append(first, tokens(1, 2))
    cache.append(second, tokens(1, 3))
    before = cache.bytes
    cache.append(cache.start("b"), tokens(1, 4))
    assert drafted(cache, "a", 9, 1) == []
    assert drafted(cache, "b", 9, 1) == [4]  # as often as 3, and later
    assert (len(cache), cache.tokens) == (2, 4)
    assert cache.bytes < before  # nothing is left of a tenant whose last answer has left
    cache.append(first, tokens(3))  # which goes on, but is not kept any more
    assert (len(cache), cache.tokens) == (2, 4)


def test_tokens_are_bounded_too() -> None:
    cache = ResponseCache(8, 10, 5)
    cache.append(cache.start("a"), tokens(1, 2, 3))
    cache.append(cache.start("b"), tokens(1, 4))
    assert (len(cache), cache.tokens) == (2, 5)
    last = cache.start("b")
    cache.append(last, tokens(1))
    assert (len(cache), cache.tokens) == (2, 3)
    cache.append(last, tokens(*range(10, 20)))  # more than there may be at all
    assert (len(cache), cache.tokens) == (0, 0)
    cache.append(last, tokens(5))
    assert cache.tokens == 0


@pytest.mark.parametrize("seed", range(5))
def test_books_hold_over_a_random_history(seed: int) -> None:
    random = np.random.default_rng(seed)
    cache, texts = ResponseCache(6, 4, 60), dict[int, tuple[str, list[int]]]()
    for _ in range(300):
        if random.random() < 0.2 or not texts:
            salt = "ab"[random.integers(2)]
            key = cache.start(salt)
            assert key is not None
            texts[key] = salt, []
        key = int(random.choice(list(texts)))
        new = random.integers(0, 3, random.integers(1, 6)).tolist()
        texts[key][1].extend(new)
        cache.append(key, tokens(*new))
        kept = [key for key in texts if key in cache._order]
        texts = {key: texts[key] for key in kept}
        assert kept == list(cache._order)
        assert cache.tokens == sum(len(text) for _, text in texts.values()) <= 60
        assert len(cache) <= 4
        for salt in "ab":
            own = [text for other, text in texts.values() if other == salt]
            follows = {b for text in own for a, b in pairwise(text) if a == 1}
            assert set(drafted(cache, salt, 2, 1)[:1]) <= follows
            assert bool(drafted(cache, salt, 2, 1)) == bool(follows)


def test_nothing_is_kept_where_nothing_may_be() -> None:
    cache = ResponseCache(8, 0, 1000)
    key = cache.start("")
    assert key is None
    cache.append(key, tokens(1, 2))
    assert (len(cache), cache.tokens, cache.bytes) == (0, 0, 0)
    assert cache.speculate("", tokens(1), 1, 8, 1.0, 0.1) is None
