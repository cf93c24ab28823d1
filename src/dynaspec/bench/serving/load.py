"""Puts load on a server: requests at their times, so many at once at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace

from .records import Record

Send = Callable[[int], Awaitable[Record]]
"""Sends request number i, and never raises for what the server does."""


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a load."""

    records: tuple[Record, ...]
    """In the order of the requests."""
    duration_s: float
    """From the start to the end of the last answer."""
    client_cpu_s: float
    """Processor time of this process meanwhile."""
    send_lag_s: float
    """By how much the latest of the requests was late, other than for the limit of concurrency."""

    def with_records(self, records: Sequence[Record]) -> Load:
        """The same with other records."""
        return replace(self, records=tuple(records))


async def put_load(
    send: Send, times: Sequence[float], max_concurrency: int | None, on_done: Callable[[], None]
) -> Load:
    """Sends a request at each of the times, in seconds from now.

    Args:
        on_done: called after every answer.
    """
    places: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(max_concurrency) if max_concurrency is not None else nullcontext()
    )
    lags = [0.0] * len(times)
    cpu = time.process_time()
    start = time.perf_counter()

    async def one(index: int) -> Record:
        due = start + times[index]
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        arrived = time.perf_counter()
        lags[index] = arrived - due
        async with places:
            record = await send(index)
        on_done()
        return record.queued(record.start_s - arrived)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(len(times))]
    end = time.perf_counter()
    return Load(
        records=tuple(task.result() for task in tasks),
        duration_s=end - start,
        client_cpu_s=time.process_time() - cpu,
        send_lag_s=max(lags),
    )
