from __future__ import annotations

import asyncio

from dynaspec.bench.serving.load import put_load
from unit.bench.serving.records import answered, failed


async def test_no_more_than_so_many_at_once():
    at_once = most = 0
    waiting: list[asyncio.Event] = []

    async def send(index):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        event = asyncio.Event()
        waiting.append(event)
        if len(waiting) == 3:  # all places are taken: the first may end
            waiting[0].set()
        elif len(waiting) > 3:
            for earlier in waiting:
                earlier.set()
        await event.wait()
        at_once -= 1
        return failed("x") if index == 1 else answered(float(index), [1.0], 1)

    done = []
    load = await put_load(send, [0.0] * 6, 3, lambda: done.append(1))
    assert most == 3
    assert len(done) == 6
    assert [record.start_s for record in load.records] == [0.0, 0.0, 2.0, 3.0, 4.0, 5.0]
    assert [record.failure is None for record in load.records] == [True, False, True, True, True, True]
    assert load.duration_s > 0
    assert load.client_cpu_s >= 0


async def test_requests_are_sent_in_the_order_of_their_times():
    sent = []

    async def send(index):
        sent.append(index)
        return answered(0.0, [1.0], 1)

    await put_load(send, [0.03, 0.0, 0.015], None, lambda: None)
    assert sent == [1, 2, 0]
