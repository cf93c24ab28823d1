"""What the dashboard draws, from two looks at an engine; and who looks when."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from dynaspec.contract.errors import DynaspecError
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.stats import EngineSnapshot
from dynaspec.server.dashboard.live import LiveFeed, Moment, point
from support.snapshots import snapshot

BEFORE = SpecCounts(steps=10, drafts=10, draft_tokens=30, accepted=20, draft_emitted=30, emitted=30, step_s=1.0)
AFTER = SpecCounts(
    steps=14,
    drafts=18,
    draft_tokens=62,
    accepted=44,
    draft_emitted=62,
    emitted=62,
    draft_s=0.04,
    verify_s=0.16,
    step_s=1.24,
)


def test_a_point_is_what_happened_between_two_looks() -> None:
    drawn = point(
        [
            Moment(100.0, snapshot(BEFORE, generated=35)),
            Moment(102.0, snapshot(AFTER, generated=75, running=3, waiting=2, kv_blocks_used=25)),
        ]
    )
    assert (drawn.emitted_per_s, drawn.accepted_per_s) == (20.0, 12.0)
    assert (drawn.acceptance_length, drawn.acceptance_rate) == (4.0, 0.75)
    assert (drawn.draft_length, drawn.accepted_length) == (4.0, 3.0)
    assert (drawn.step_ms, drawn.draft_ms, drawn.verify_ms) == pytest.approx((60.0, 10.0, 40.0))
    assert drawn.busy == pytest.approx(0.12)
    assert (drawn.t, drawn.running, drawn.waiting) == (102.0, 3, 2)


def test_nothing_is_made_up_where_nothing_happened() -> None:
    drawn = point([Moment(100.0, snapshot(AFTER)), Moment(101.0, snapshot(AFTER, goodput=500.0))])
    assert (drawn.emitted_per_s, drawn.busy) == (0.0, 0.0)
    unknown = ("acceptance_length", "acceptance_rate", "draft_length", "accepted_length", "step_ms", "ttft_p50_ms")
    assert [getattr(drawn, name) for name in (*unknown, "itl_p95_ms", "plain_per_s", "measured_per_s")] == [None] * 9


def test_a_run_that_its_request_did_not_live_to_see_counts_no_tokens_that_nobody_got() -> None:
    ended = SpecCounts(accepted=8)
    drawn = point([Moment(0.0, snapshot()), Moment(1.0, snapshot(ended, generated=3))])
    assert drawn.accepted_per_s == drawn.emitted_per_s == 3.0


def test_latencies_are_those_of_the_minute_not_of_the_last_second_nor_of_all_time() -> None:
    waits = [0.2] * 50
    looks = [
        Moment(0.0, snapshot(first_token_s=waits)),
        Moment(30.0, snapshot(first_token_s=[*waits, 0.0045, 0.0045], inter_token_s=[0.018])),
        Moment(31.0, snapshot(first_token_s=[*waits, 0.0045, 0.0045, 0.0145, 0.0145], inter_token_s=[0.018])),
    ]
    drawn = point(looks)
    assert drawn.ttft_p50_ms == pytest.approx(5.0)
    assert drawn.ttft_p95_ms == pytest.approx(19.0)
    assert drawn.itl_p50_ms == pytest.approx(17.5)


def test_expectations_are_drawn_beside_what_was_measured() -> None:
    expected = {
        "mode": "speculate",
        "plain_goodput": 110.0,
        "plain_measured_over_expected": 1.1,
        "draft_goodput": 270.0,
        "draft_measured_over_expected": 0.9,
    }
    now = snapshot(AFTER, running=1, goodput=250.0, estimates=expected)
    drawn = point([Moment(0.0, snapshot(BEFORE)), Moment(1.0, now)])
    assert (drawn.plain_per_s, drawn.drafting_per_s, drawn.measured_per_s) == pytest.approx((110.0, 270.0, 250.0))


class Engine:
    """Counts how often it is looked at; time goes by a second a look."""

    def __init__(self) -> None:
        self.looks = 0
        self.broken = False

    async def snapshot(self) -> EngineSnapshot:
        if self.broken:
            raise DynaspecError("the engine has stopped: out of luck")
        self.looks += 1
        return snapshot(generated=10 * self.looks)

    def clock(self) -> float:
        return float(self.looks)


def feed_of(engine: Engine) -> LiveFeed:
    return LiveFeed(engine.snapshot, interval_s=0.001, clock=engine.clock)


async def test_who_watches_gets_every_point_once() -> None:
    engine = Engine()
    seen: list[float] = []
    async with aclosing(feed_of(engine).follow()) as updates:
        async for update in updates:
            seen += [drawn.t for drawn in update.points]
            if len(seen) == 5:
                break
    assert seen == [2.0, 3.0, 4.0, 5.0, 6.0]


async def test_nobody_looks_while_nobody_watches() -> None:
    engine = Engine()
    feed = feed_of(engine)
    assert engine.looks == 0
    async with aclosing(feed.follow()) as updates:
        await anext(updates)
        await anext(updates)
    seen = engine.looks
    await asyncio.sleep(0.02)
    assert engine.looks == seen == 2


async def test_watchers_share_the_looks() -> None:
    engine = Engine()
    feed = LiveFeed(engine.snapshot, interval_s=30.0, clock=engine.clock)
    async with aclosing(feed.follow()) as one, aclosing(feed.follow()) as other:
        await anext(one)
        await anext(other)
    assert engine.looks == 1


async def test_who_comes_later_gets_what_is_remembered_but_no_point_over_the_time_nobody_watched() -> None:
    engine = Engine()
    feed = feed_of(engine)
    async with aclosing(feed.follow()) as updates:
        for _ in range(4):
            await anext(updates)
    engine.looks += 100
    async with aclosing(feed.follow()) as updates:
        first, second = await anext(updates), await anext(updates)
    assert [drawn.t for drawn in first.points] == [2.0, 3.0, 4.0]
    assert len(first.minute) == 1
    assert [drawn.emitted_per_s for drawn in second.points] == [10.0]


async def test_points_and_moments_are_forgotten_in_time() -> None:
    engine = Engine()
    feed = LiveFeed(engine.snapshot, interval_s=0.0001, keep_s=0.0005, clock=engine.clock)
    async with aclosing(feed.follow()) as updates:
        for _ in range(100):
            update = await anext(updates)
    assert update.minute[-1].at - update.minute[0].at == 60.0
    async with aclosing(feed.follow()) as updates:
        assert len((await anext(updates)).points) == 5


async def test_a_clock_that_is_set_back_makes_no_point() -> None:
    times = iter([100.0, 50.0, 51.0])
    feed = LiveFeed(Engine().snapshot, interval_s=0.001, clock=lambda: next(times))
    async with aclosing(feed.follow()) as updates:
        found = [(await anext(updates)).points for _ in range(3)]
    assert [[drawn.t for drawn in points] for points in found] == [[], [], [51.0]]


async def test_a_stopped_engine_is_said_to_be_stopped() -> None:
    engine = Engine()
    async with aclosing(feed_of(engine).follow()) as updates:
        assert (await anext(updates)).stopped is None
        engine.broken = True
        update = await anext(updates)
        assert (update.stopped, update.minute) == ("the engine has stopped: out of luck", ())
        assert (await anext(updates)).stopped is not None
