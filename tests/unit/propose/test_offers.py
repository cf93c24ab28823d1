"""What lookups offer, held against the text that comes."""

from __future__ import annotations

import numpy as np

from dynaspec.contract.proposer import Offers
from dynaspec.propose.router import came_true, view_columns


def offers(*tokens: list[int], match: int = 2) -> Offers:
    """The same match for all that have found something."""
    table = np.full((len(tokens), 1 + max(map(len, tokens))), 9, dtype=np.int64)
    for row, own in zip(table, tokens, strict=True):
        row[: len(own)] = own
    return Offers(np.array([(match if own else 0, len(own)) for own in tokens], dtype=np.int64), table)


def texts(*rows: list[int]) -> np.ndarray:
    table = np.full((len(rows), 8), 9, dtype=np.int32)
    for row, text in zip(table, rows, strict=True):
        row[: len(text)] = text
    return table


def column(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_tokens_are_right_until_the_first_that_differs() -> None:
    asked = offers([1, 2, 3], [1, 5, 3], [4, 2, 3], [])
    table = texts(*[[7, 1, 2, 3, 4]] * 4)
    told = came_true((None, asked), table, column(0, 1, 2, 3), column(1, 1, 1, 1), column(4, 4, 4, 4))
    assert told == (None, ((2, 3, 3), (2, 3, 1), (2, 3, 0), (0, 0, 0)))


def test_only_the_text_that_has_come_is_compared() -> None:
    asked = offers([1, 9, 9], [1, 2], [1, 2])
    table = texts([1, 9, 9], [1, 2, 3, 9], [1, 2, 9])
    told = came_true((asked,), table, column(0, 1, 2), column(0, 0, 0), column(1, 4, 0))
    assert told == (((2, 1, 1), (2, 2, 2), (2, 0, 0)),)


def test_lanes_need_not_be_those_of_the_columns() -> None:
    told = came_true((offers([3], [5]),), texts([5], [9], [3]), column(2, 0), column(0, 0), column(1, 1))
    assert told == (((2, 1, 1), (2, 1, 1)),)


def test_where_nobody_offers_nothing_is_told() -> None:
    nobody, none = column(), column(0)
    assert came_true((None, None), texts([1]), none, none, none + 1) == ()
    assert came_true((), texts([1]), none, none, none + 1) == ()
    assert came_true((offers([]),), texts([1]), none, none, none + 1) == (((0, 0, 0),),)
    assert came_true(
        (Offers(np.zeros((0, 2), np.int64), np.zeros((0, 0), np.int64)),), texts([1]), nobody, nobody, nobody
    ) == ((),)


def test_views_show_how_much_is_on_offer() -> None:
    assert view_columns((None, offers([1, 2], []))) == (None, ((2, 2), (0, 0)))


def test_offers_to_some_of_the_requests() -> None:
    chosen = offers([1, 2], [], [3]).select([2, 0])
    assert chosen.found.tolist() == [[2, 1], [2, 2]]
    assert chosen.tokens[:, 0].tolist() == [3, 1]
