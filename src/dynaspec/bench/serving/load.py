"""A load test from settings to figures."""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynaspec.contract.errors import ConfigError
from dynaspec.observe.counts import SpecCounts
from dynaspec.result_output import Tell

from .client import RequestRecord, send
from .results import Load, LoadFigures, measure, read_counters
from .server import LoadSettings, Served, Server, ServerError, connect
from .workload import (
    RANDOM,
    Fitted,
    LocalTokens,
    RequestSpec,
    Tokens,
    data_set_name,
    draw_requests,
    find_tokens,
    fit_requests,
)

_OTHERS = 64
"""Files that a process has open beside its connections."""
Send = Callable[[int], Awaitable[RequestRecord]]
"""Sends request number i, and never raises for what the server does."""


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start, ascending.

    Times between requests are gamma distributed with mean 1/rate and shape ``burstiness``: 1 makes them a Poisson
    process, less makes bursts, more makes them even. They are scaled so that the last request is sent after
    count/rate seconds: otherwise the rate that is offered would differ by a few per cent from seed to seed.

    Args:
        rate: requests a second; infinity = all at once.
        burstiness: infinity = at even distances.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count, 1.0 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return [float(time) for time in times * (count / rate / times[-1])]


def allow_connections(count: int) -> None:
    """Raises this process's limit of open files, as far as it may, to so many connections and what else it needs.

    Raises:
        ConfigError: the system allows fewer.
    """
    needed = count + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{count} requests at once need more open files than the {hard} that the system allows; "
            f"expected --max-concurrency of at most {hard - _OTHERS}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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

    async def one(index: int) -> RequestRecord:
        due = start + times[index]
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        arrived = time.perf_counter()
        lags[index] = arrived - due
        async with places:
            record = await send(index)
        on_done()
        return replace(record, queued_s=record.start_s - arrived)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(len(times))]
    end = time.perf_counter()
    return Load(
        records=tuple(task.result() for task in tasks),
        duration_s=end - start,
        client_cpu_s=time.process_time() - cpu,
        send_lag_s=max(lags),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedLoad:
    """A load test that has run, whether or not its requests succeeded."""

    settings: LoadSettings
    served: Served
    fitted: Fitted
    load: Load
    measured: LoadFigures
    counters: SpecCounts | None
    """What the server's counters of speculation grew by; None if it has none."""


async def run_load_test(settings: LoadSettings, progress: Tell) -> FinishedLoad:
    """Prepares the requests, waits for the server if asked to, warms it up, puts the load on it, and measures.

    Raises:
        ServerError: nobody answers, or the server lacks what the test needs.
        ConfigError: the workload cannot be made.
    """
    workload, traffic = settings.workload, settings.traffic
    allow_connections(min(workload.num_prompts, traffic.max_concurrency or workload.num_prompts))
    async with connect(settings.target) as server:
        if settings.target.ready_check_timeout_s > 0:
            await server.wait(settings.target.ready_check_timeout_s)
        served = await server.served()
        tokens = await find_tokens(server, served.name, settings.tokenizer)
        asked = await draw_requests(workload, tokens)
        fitted = await fit_requests(asked, tokens, served.max_model_len, is_chat=settings.target.api.is_chat)
        sender = _Sender(server, _bodies(settings, served, fitted.requests), settings.target.request_id_prefix)
        await _prepare(sender, settings, progress)
        before = await _counters(server)
        load = await _put(sender, settings, progress)
        after = await _counters(server)
    load = _recounted(load, tokens)
    return FinishedLoad(
        settings=settings,
        served=served,
        fitted=fitted,
        load=load,
        measured=measure(load, settings.reported),
        counters=after - before if after is not None and before is not None else None,
    )


class _Sender:
    """Sends requests by their number."""

    def __init__(self, server: Server, bodies: Sequence[Mapping[str, Any]], prefix: str) -> None:
        self._server = server
        self._bodies = bodies
        self._prefix = prefix
        self.count = len(bodies)

    async def send(self, index: int, kind: str = "") -> RequestRecord:
        """Sends request ``index``; its id in the server's log is the prefix, the kind and the number."""
        target = self._server.target
        headers = {**self._server.headers, "X-Request-Id": f"{self._prefix}{kind}{index}"}
        return await send(self._server.session, target.url, target.api, self._bodies[index], headers)


def _bodies(settings: LoadSettings, served: Served, requests: Sequence[RequestSpec]) -> list[dict[str, Any]]:
    further = dict(settings.fields)
    if data_set_name(settings.workload) == RANDOM:
        further.setdefault("ignore_eos", True)
    if settings.acceptance or (settings.acceptance is None and served.is_own):
        further.setdefault("speculation", {"metrics": "summary"})
    api = settings.target.api
    return [api.body(served.name, asked.prompt, asked.output_len) | further for asked in requests]


async def _prepare(sender: _Sender, settings: LoadSettings, progress: Tell) -> None:
    """Tries the first request, if asked to, and sends it again to warm the server up."""
    if settings.target.ready_check_timeout_s > 0:
        tried = await sender.send(0, "try-")
        if tried.failure is not None:
            raise ServerError(f"the first request failed: {tried.failure.kind}: {tried.failure.message}")
    count = settings.traffic.num_warmups
    if count == 0:
        return
    done = _counting("warm-up", count, progress)
    await put_load(lambda _: sender.send(0, "warm-up-"), [0.0] * count, settings.traffic.max_concurrency, done)


async def _put(sender: _Sender, settings: LoadSettings, progress: Tell) -> Load:
    traffic = settings.traffic
    times = arrival_times(sender.count, traffic.request_rate, traffic.burstiness, settings.workload.seed)
    return await put_load(sender.send, times, traffic.max_concurrency, _counting("requests", sender.count, progress))


def _counting(stage: str, total: int, progress: Tell) -> Callable[[], None]:
    done = 0
    progress(stage, 0, total)

    def one_more() -> None:
        nonlocal done
        done += 1
        progress(stage, done, total)

    return one_more


async def _counters(server: Server) -> SpecCounts | None:
    page = await server.get("/metrics")
    return None if page is None else read_counters(page.decode("utf-8", "replace"))


def _recounted(load: Load, tokens: Tokens | None) -> Load:
    """Output tokens by the client's own tokenizer, where the server has not counted them."""
    if not isinstance(tokens, LocalTokens):
        return load
    records = (
        record if record.usage is not None else replace(record, output_tokens=tokens.count(record.text))
        for record in load.records
    )
    return replace(load, records=tuple(records))
