"""Keeps an engine at a given number of requests, and records what its steps did."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dynaspec.contract.errors import ConfigError
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
class Window:
    """What an engine did in a stretch of time."""

    seconds: float
    counts: SpecCounts

    @property
    def tokens_per_second(self) -> float:
        return self.counts.emitted / self.seconds


class SteadyLoop:
    """Speed at a constant number of requests, measured in stretches between which other engines may have their turn.

    The clock starts when all requests decode: so neither the first prompts count nor a tail with few requests left.
    """

    def __init__(self, engine: Engine, jobs: Iterable[Job], concurrency: int) -> None:
        """
        Args:
            jobs: enough of them, or endless.
        """
        self._engine = engine
        self._loop = ClosedLoop(engine, jobs, concurrency)
        self._concurrency = concurrency
        self._full = False
        self._start = engine.stats()
        self._seconds = 0.0

    def go_on(self, tokens: int) -> None:
        """Decodes until so many have been emitted since the first stretch began.

        Raises:
            ConfigError: there were not enough requests.
        """
        step: StepTrace | None = None
        while not self._full and (step := self._loop.step()) is not None:
            self._full = step.counts.request_steps >= self._concurrency
            self._start = self._engine.stats()
        started = time.perf_counter()
        while self._full and self._emitted() < tokens:
            step = self._loop.step()
            self._full = step is not None
        self._seconds += time.perf_counter() - started
        if not self._full:
            raise ConfigError(f"the requests ended before {tokens} tokens were decoded {self._concurrency} at a time")

    def close(self) -> None:
        """Aborts what is still running."""
        self._loop.close()

    @property
    def window(self) -> Window:
        """All stretches together."""
        return Window(self._seconds, self._engine.stats() - self._start)

    def _emitted(self) -> int:
        return self._engine.stats().emitted - self._start.emitted


def steady_window(engine: Engine, jobs: Iterable[Job], concurrency: int, tokens: int) -> Window:
    """Speed at a constant number of requests, in one stretch. See ``SteadyLoop``."""
    loop = SteadyLoop(engine, jobs, concurrency)
    try:
        loop.go_on(tokens)
        return loop.window
    finally:
        loop.close()


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


def warm_prompts(
    engine: Engine, prompts: Sequence[tuple[int, ...]], concurrency: int, max_draft_tokens: int | None = None
) -> None:
    """Decodes a token of every prompt, which leaves their KV in the engine's prefix cache.

    Args:
        max_draft_tokens: 0 = in the target's alone.
    """
    params = SamplingParams(temperature=0, max_tokens=2, max_draft_tokens=max_draft_tokens)
    run_all(engine, [Job(prompt, params) for prompt in prompts], concurrency)


def cacheable(prompt: Sequence[int], longest: int, block_size: int) -> tuple[int, ...]:
    """The end of a prompt, as long as whole blocks and one token: all but that token can come from the prefix cache, so
    that the request decodes at once."""
    length = min(len(prompt), longest)
    return tuple(prompt[-((length - 1) // block_size * block_size + 1) :])
