"""A server process looked at from outside: its memory, and what it says of its load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from dynaspec.contract.errors import DynaspecError

_NAMES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass(frozen=True, slots=True)
class Load:
    """What a server is busy with."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV blocks that running requests hold."""

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.kv_usage)


@dataclass(frozen=True, slots=True)
class Sample:
    """One look."""

    at_s: float
    """Since the watch began."""
    memory_mb: float
    """Resident; 1 MB = 10⁶ bytes."""
    load: Load


async def read_load(session: aiohttp.ClientSession, url: str) -> Load:
    """
    Raises:
        DynaspecError: the metrics are not those of a dynaspec server.
    """
    async with session.get(url + "/metrics") as response:
        page = await response.text()
    found = {
        name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if (name := sample.name.partition(":")[2]) in _NAMES
    }
    if len(found) < len(_NAMES):
        raise DynaspecError(f"{url}/metrics has {sorted(found)}; expected {', '.join(_NAMES)}")
    return Load(int(found[_NAMES[0]]), int(found[_NAMES[1]]), found[_NAMES[2]])


def resident_mb(pid: int) -> float:
    """What a process keeps in memory, from Linux's /proc.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024 / 1e6


class Watch:
    """Looks at a server every so often, until its task is cancelled."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pid: int, every_s: float) -> None:
        self.samples: list[Sample] = []
        self._session = session
        self._url = url
        self._pid = pid
        self._every_s = every_s

    async def run(self) -> None:
        began = time.monotonic()
        while True:
            load = await read_load(self._session, self._url)
            self.samples.append(Sample(time.monotonic() - began, resident_mb(self._pid), load))
            await asyncio.sleep(self._every_s)


async def until_idle(session: aiohttp.ClientSession, url: str, timeout_s: float) -> Load:
    """Waits until a server has nothing to do; its load at last, whether or not that is nothing."""
    until = time.monotonic() + timeout_s
    while not (load := await read_load(session, url)).idle and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return load


def growth_mb_per_min(samples: Sequence[Sample], from_s: float) -> float | None:
    """Slope of the memory, by least squares over the samples from a time on; None with fewer than two of them."""
    later = [sample for sample in samples if sample.at_s >= from_s]
    if len(later) < 2:
        return None
    slope, _ = np.polyfit([sample.at_s / 60 for sample in later], [sample.memory_mb for sample in later], 1)
    return float(slope)
