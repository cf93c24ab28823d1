"""Steps one after the other, or each scheduled while the one before is running."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from dynaspec.schedule.request import Request

from .step import Ran, Step


class Loop(Protocol):
    """Drives steps."""

    def advance(self) -> list[Request]:
        """Until one step is committed, or nobody can run; returns the requests that got tokens or ended."""
        ...

    def close(self) -> None:
        """Waits for a step in flight and drops it."""
        ...


class SerialLoop:
    """Schedule, run, commit."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def advance(self) -> list[Request]:
        scheduled = self._step.schedule()
        return [] if scheduled is None else self._step.commit(self._step.run(scheduled))

    def close(self) -> None:
        """Nothing is ever in flight."""


class OverlappedLoop:
    """One step deep: step i + 1 is scheduled while step i runs in a thread of its own.

    The schedule is made for the most that step i may commit. When i is committed, the surplus is subtracted and step
    i + 1 is brought up to date (``Step.settle``) before its inputs are built.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._runner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dynaspec-step")
        self._in_flight: Future[Ran] | None = None

    def advance(self) -> list[Request]:
        if self._in_flight is None:
            first = self._step.schedule()
            if first is None:
                return []
            self._in_flight = self._runner.submit(self._step.run, first)
        ahead = self._step.schedule()
        in_flight, self._in_flight = self._in_flight, None
        touched = self._step.commit(in_flight.result())
        settled = None if ahead is None else self._step.settle(ahead)
        if settled is not None:
            self._in_flight = self._runner.submit(self._step.run, settled)
        return touched

    def close(self) -> None:
        self._runner.shutdown(wait=True, cancel_futures=True)
        self._in_flight = None
