from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaspec.control.admission import admit
from unit.control.seam import UNHURRIED


def one_by_one(lengths: list[int], budget: int, first: int) -> tuple[int, ...]:
    """The definition, slot by slot."""
    admitted = [0] * len(lengths)
    for position in range(max(lengths, default=0)):
        for offset in range(len(lengths)):
            request = (first + offset) % len(lengths)
            if lengths[request] > position and sum(admitted) < budget:
                admitted[request] += 1
    return tuple(admitted)


@UNHURRIED
@given(st.lists(st.integers(0, 9), max_size=7), st.integers(0, 40), st.integers(0, 20))
def test_it_is_the_slot_by_slot_definition(lengths: list[int], budget: int, first: int) -> None:
    assert admit(lengths, budget, first) == one_by_one(lengths, budget, first)


def test_the_last_round_starts_where_it_is_told() -> None:
    assert admit((3, 3, 3), 4, first=0) == (2, 1, 1)
    assert admit((3, 3, 3), 4, first=2) == (1, 1, 2)
    assert admit((3, 3, 3), 4, first=3) == (2, 1, 1)


def test_a_budget_that_suffices_changes_nothing() -> None:
    assert admit((3, 0, 5), 8) == (3, 0, 5)
