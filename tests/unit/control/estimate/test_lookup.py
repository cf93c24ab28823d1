"""What is learnt of lookups: how likely their tokens are right, by the length of the match and by the request."""

from __future__ import annotations

import numpy as np
import pytest

from dynaspec.control.estimate.acceptance import LookupModel
from dynaspec.control.estimate.settings import AutoSettings

NOBODY = -1


def model(requests: int = 2) -> LookupModel:
    made = LookupModel(AutoSettings())
    for slot in range(requests):
        made.admit(slot)
    return made


def column(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def chance(lookup: LookupModel, match: int, slot: int = NOBODY) -> float:
    return float(lookup.survival(column(slot), column(match), column(1), 1)[0, 0])


def true_chance(match: int) -> float:
    """Other than what is believed at first: 0.67 for four tokens, 0.84 for eight."""
    return float(1.0 / (1.0 + np.exp(1.2 - 0.96 * np.log2(match))))


def test_longer_matches_are_believed_more_before_anything_is_known() -> None:
    lookup = model()
    assert chance(lookup, 1) < chance(lookup, 2) < chance(lookup, 4)
    assert chance(lookup, 2) == pytest.approx(0.56)
    assert chance(lookup, 16) > 0.9


def test_a_tokens_place_counts_like_as_long_a_match() -> None:
    """The tokens before it agree too."""
    lookup = model()
    survival = lookup.survival(column(0), column(3), column(4), 6)[0]
    assert survival[1] / survival[0] == pytest.approx(chance(lookup, 4))
    assert survival[3] / survival[2] == pytest.approx(chance(lookup, 6))
    assert survival[4:].tolist() == [0.0, 0.0]


def test_learns_how_right_matches_are() -> None:
    rng, lookup = np.random.default_rng(0), model()
    for _ in range(600):
        match = column(*rng.choice([4, 5, 8, 16], 2))
        right = column(*(rng.random() < true_chance(int(m)) for m in match))
        lookup.observe(column(0, 1), match, column(1, 1), right)
    for match in (4, 8, 16):
        assert chance(lookup, match) == pytest.approx(true_chance(match), abs=0.08)


def test_only_the_tokens_with_a_verdict_teach() -> None:
    known, cut = model(), model()
    known.observe(column(0), column(4), column(2), column(1))
    cut.observe(column(0), column(4), column(1), column(1))
    assert chance(known, 4) < chance(model(), 4) < chance(cut, 4)


def test_short_matches_that_are_wrong_leave_long_ones_alone() -> None:
    """In the same request: its text copies itself in some places only."""
    lookup = model(1)
    for _ in range(40):
        lookup.observe(column(0), column(1), column(1), column(0))
        lookup.observe(column(0), column(8), column(4), column(4))
    assert chance(lookup, 8, 0) > 0.85
    assert chance(lookup, 1, 0) < 0.25


def test_a_request_whose_matches_are_wrong_is_believed_less_for_a_while() -> None:
    lookup = model()
    for _ in range(20):
        lookup.observe(column(0, 1), column(4, 4), column(1, 1), column(0, 1))
    assert chance(lookup, 4, 0) < chance(lookup, 4) - 0.1 < chance(lookup, 4, 1) - 0.2
    lookup.pass_steps(400)
    assert chance(lookup, 4, 0) == pytest.approx(chance(lookup, 4), abs=0.02)


def test_what_callers_expect_counts_until_there_is_more() -> None:
    lookup = model()
    lookup.admit(0, 0.95)
    lookup.admit(1, 0.05)
    assert chance(lookup, 4, 1) < chance(lookup, 4) < chance(lookup, 4, 0)
    lookup.admit(1)
    assert chance(lookup, 4, 1) == chance(lookup, 4)


def test_nothing_is_learnt_of_requests_that_are_gone() -> None:
    lookup = model()
    lookup.observe(column(NOBODY), column(4), column(1), column(0))
    assert chance(lookup, 4) == chance(model(), 4)


def test_says_what_it_believes() -> None:
    document = model().document()
    assert document["acceptance"][:2] == pytest.approx([0.56, 0.67], abs=0.01)  # type: ignore[index]
    assert document["signal"] == {"weight": 0.8, "bias": [pytest.approx(0.241, abs=1e-3)] * 8}
