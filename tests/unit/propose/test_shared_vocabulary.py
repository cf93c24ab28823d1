"""Which tokens two vocabularies have in common."""

from __future__ import annotations

import logging

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.propose.own_vocabulary import SharedVocabulary, Translation
from unit.propose.tokenizers import Bytes, Words

OWN = {0: (True, b"<end>"), 1: (False, b"a"), 2: (False, b"b"), 3: (False, b"a"), 4: (False, b"c"), 5: (False, b"<s>")}
TARGET = {
    0: (False, b"b"),
    1: (False, b"x"),
    2: (False, b"a"),
    3: (True, b"<s>"),
    4: (True, b"<end>"),
    5: (False, b"c"),
}


def test_tokens_are_the_same_by_what_they_stand_for() -> None:
    """The first of two that stand for the same; a special token and a text that spells it differ."""
    shared = SharedVocabulary.of(OWN, TARGET, 6, 7)
    assert shared.target.tolist() == [0, 2, 4, 5]
    assert shared.own.tolist() == [2, 1, 0, 4]
    assert shared.own_of.tolist() == [2, -1, 1, -1, 0, 4, -1]


def test_tokens_that_a_model_has_no_row_for_are_left_out() -> None:
    shared = SharedVocabulary.of(OWN, TARGET, 4, 5)
    assert shared.target.tolist() == [0, 2, 4]
    assert shared.own_of.size == 5


def between(own: Words, *, any_tokens: bool = False) -> Translation:
    return Translation.between(
        own,
        Bytes(),
        len(own.spellings()),
        256,
        names=("the drafter", "the target"),
        any_tokens=any_tokens,
        own_lookbehind=4,
        target_lookbehind=4,
    )


def test_how_many_are_shared_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert between(Words("a", "b", "ab")).shared is not None
    assert caplog.messages == ["the drafter shares 2 of its 3 tokens with the target, which has 256"]


def test_too_few_are_refused() -> None:
    few = Words("a", *(f"ab{i}" for i in range(10)))
    with pytest.raises(
        ConfigError, match=r"shares 1 of its 11 tokens with the target, which has 256; .* 10%, or .*slem"
    ):
        between(few)
    assert between(few, any_tokens=True).shared is None
