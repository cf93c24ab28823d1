"""What is left out of garbage collection, and for how long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from dynaspec.heap import settle


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


class Knot:
    """Refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.self = self


def test_what_exists_is_left_out_until_the_next_call() -> None:
    knot = Knot()
    settle()
    assert gc.get_freeze_count() > 0
    gone = weakref.ref(knot)
    del knot
    gc.collect()
    assert gone() is not None
    settle()
    assert gone() is None
