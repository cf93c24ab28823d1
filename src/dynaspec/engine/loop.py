"""Steps one after the other, or each scheduled while the one before is running."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

from dynaspec.schedule.request import Request

from .outcome import ExecutedStep, ScheduledStep
from .step import Step


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
        if scheduled is None:
            return []
        try:
            ran = self._step.run(scheduled)
        except BaseException:  # an interrupt too must leave the books in order
            self._step.discard(scheduled)
            raise
        return self._step.commit(ran)

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
        self._in_flight: tuple[ScheduledStep, Future[ExecutedStep]] | None = None

    def advance(self) -> list[Request]:
        if self._in_flight is None:
            self._submit(self._step.schedule())
        if self._in_flight is None:
            return []
        scheduled, future = self._in_flight
        self._in_flight = None
        ahead = self._step.schedule()
        ran = self._finish(scheduled, future, ahead)
        touched = self._step.commit(ran)
        self._submit(None if ahead is None else self._step.settle(ahead))
        return touched

    def close(self) -> None:
        self._runner.shutdown(wait=True, cancel_futures=True)
        self._in_flight = None

    def _submit(self, scheduled: ScheduledStep | None) -> None:
        if scheduled is not None:
            self._in_flight = scheduled, self._runner.submit(self._step.run, scheduled)

    def _finish(
        self, scheduled: ScheduledStep, future: Future[ExecutedStep], ahead: ScheduledStep | None
    ) -> ExecutedStep:
        """Waits for the step in flight; if it fails, it and the one planned on top of it are given up."""
        try:
            return future.result()
        except BaseException:
            wait([future])
            for given_up in (scheduled, ahead):
                if given_up is not None:
                    self._step.discard(given_up)
            raise
