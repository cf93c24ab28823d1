"""Keeps an engine at a given number of requests, and records what its steps did."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.engine.engine import Engine
from dynaspec.observe.counts import SpecCounts


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of an engine."""

    end_s: float
    """Since the loop began."""
    seconds: float
    counts: SpecCounts
    """Of this step alone."""


class ClosedLoop:
    """So many clients: each sends its next request as soon as the one before is answered."""

    def __init__(self, engine: Engine, jobs: Iterable[Job], concurrency: int) -> None:
        """
        Args:
            jobs: may be endless; started in this order.
        """
        self._engine = engine
        self._jobs: Iterator[Job] = iter(jobs)
        self._concurrency = concurrency
        self._live: set[str] = set()
        self._started = 0
        self._began = time.perf_counter()
        self._counts = engine.stats()
        self.outputs: dict[int, tuple[int, ...]] = {}
        """Number of the job → its output's token ids, for those that have finished."""

    def step(self) -> StepTrace | None:
        """Starts requests for clients that wait, and runs one step; None when all is done."""
        self._refill()
        if not self._live:
            return None
        before = time.perf_counter()
        outputs = self._engine.step()
        after = time.perf_counter()
        for output in outputs:
            self._live.remove(output.request_id)
            self.outputs[int(output.request_id)] = tuple(output.outputs[0].token_ids)
        counts, self._counts = self._counts, self._engine.stats()
        return StepTrace(after - self._began, after - before, self._counts - counts)

    def close(self) -> None:
        """Aborts what is still running."""
        for request_id in self._live:
            self._engine.abort(request_id)
        self._live.clear()

    def _refill(self) -> None:
        while len(self._live) < self._concurrency:
            job = next(self._jobs, None)
            if job is None:
                return
            name = str(self._started)
            self._engine.add(name, job.prompt, replace(job.params, output_kind=RequestOutputKind.FINAL_ONLY))
            self._live.add(name)
            self._started += 1


@dataclass(frozen=True, slots=True)
class Finished:
    """All of some jobs, decoded."""

    steps: tuple[StepTrace, ...]
    outputs: tuple[tuple[int, ...], ...]
    """Token ids, in the order of the jobs."""

    @property
    def seconds(self) -> float:
        return self.steps[-1].end_s

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.outputs))


def run_all(engine: Engine, jobs: Sequence[Job], concurrency: int) -> Finished:
    """Decodes every job, so many at a time."""
    loop = ClosedLoop(engine, jobs, concurrency)
    try:
        steps = tuple(iter(loop.step, None))
    finally:
        loop.close()
    return Finished(steps, tuple(loop.outputs[i] for i in range(len(jobs))))
