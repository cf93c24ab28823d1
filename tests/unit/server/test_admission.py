"""``Admission``: how many, how soon again, and nobody while it drains."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from dynaspec.server.errors import ApiError
from dynaspec.server.middleware import Admission


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission(clock: Clock) -> Admission:
    """Room for two that run and three that wait."""
    return Admission(2, 3, clock)


async def refusal(admission: Admission, weight: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        async with admission.slot(weight):
            pass
    return caught.value


async def test_as_many_as_run_and_wait_are_let_in(admission):
    async with AsyncExitStack() as stack:
        for count in range(1, 6):
            await stack.enter_async_context(admission.slot())
            assert admission.active == count
        error = await refusal(admission)
        assert (error.status, error.code, admission.rejected) == (503, "overloaded", 1)
        assert admission.active == 5
    assert admission.active == 0
    async with admission.slot():
        assert admission.active == 1


async def test_a_request_counts_as_its_continuations(admission):
    async with admission.slot(4):
        assert (await refusal(admission, 2)).status == 503
        async with admission.slot(1):
            assert admission.active == 5


async def test_more_than_ever_fits_is_a_bad_request(admission):
    error = await refusal(admission, 6)
    assert error.status == 400
    assert "6" in error.message
    assert "5" in error.message
    assert admission.rejected == 0


async def test_a_failed_request_leaves_its_place(admission):
    with pytest.raises(ZeroDivisionError):
        async with admission.slot(5):
            raise ZeroDivisionError
    assert admission.active == 0


async def test_without_completions_the_wait_is_a_guess(admission):
    async with admission.slot(5):
        error = await refusal(admission)
    assert error.headers == {"Retry-After": "5"}


@pytest.mark.parametrize(("weight", "expected"), [(1, "2"), (4, "8")])
async def test_the_wait_follows_from_the_rate_of_completions(admission, clock, weight, expected):
    async with admission.slot(1):
        clock.now = 100.0
    for _ in range(4):  # until 108: five in eight seconds, with the one at 100
        clock.now += 2.0
        async with admission.slot(1):
            pass
    clock.now = 110.0
    async with admission.slot(5):
        assert (await refusal(admission, weight)).headers == {"Retry-After": expected}


async def test_what_was_long_ago_does_not_count(admission, clock):
    async with admission.slot(5):
        pass
    clock.now = 61.0
    async with admission.slot(5):
        assert (await refusal(admission)).headers == {"Retry-After": "5"}


async def test_the_wait_is_bounded(admission, clock):
    async with admission.slot(1):
        pass
    clock.now = 59.0
    async with admission.slot(5):
        assert (await refusal(admission, 5)).headers == {"Retry-After": "60"}


async def test_while_it_drains_nobody_is_let_in(admission):
    async with admission.slot():
        admission.drain()
        error = await refusal(admission)
        assert admission.active == 1
    assert (error.status, error.code, error.headers["Connection"]) == (503, "shutting_down", "close")
    assert admission.draining
    assert (await refusal(admission)).code == "shutting_down"
    assert admission.rejected == 0
