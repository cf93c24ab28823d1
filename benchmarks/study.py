"""What studies share: rounds that alternate, engines kept at a number of requests, sides in other processes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np

from dynaspec.bench.datasets import BenchPrompt
from dynaspec.bench.decoders import ClosedLoop, Job, SharedModels, StepTrace, open_engine, run_all
from dynaspec.bench.offline import lower_bound, ratios
from dynaspec.cli.console import print_error
from dynaspec.contract.errors import ConfigError, DynaspecError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.policies.short_names import PLAIN, parse_policy
from dynaspec.engine.engine import Engine
from dynaspec.observe.counts import SpecCounts
from dynaspec.result_output import Tell


def pair_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of a study's options, which begin with the checkpoints of the toy pair."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tests/models/target", help="the target's checkpoint folder")
    parser.add_argument("--draft-model", default="tests/models/draft", help="the drafter's checkpoint folder")
    return parser


@contextmanager
def errors_told() -> Iterator[None]:
    """An error that the user can mend is one line on stderr; the exit code is 2."""
    try:
        yield
    except DynaspecError as error:
        print_error(str(error))
        sys.exit(2)


def shuffled(sides: Sequence[str], turn: int) -> list[str]:
    """The order of a round: another one each time, the same in every run.

    A side that always follows the same other one is measured in what that leaves behind: always right after the longest
    drafts, ``auto`` decoded plainly 4 % slower than plain decoding at 16 requests; in shuffled rounds as fast.
    """
    return [sides[i] for i in np.random.default_rng(turn).permutation(len(sides))]


def in_the_running(rates: Mapping[str, Sequence[float]], least: float, *, always: Collection[str]) -> list[str]:
    """The sides that may still be the best, and those that are measured ``always``.

    A rival must not sit out by bad luck, so it has to be behind for certain: by the 95 % bound of the median.

    Args:
        rates: side → one figure a round.
        least: share of the best side's figures that the others may have.
    """
    best = rates[max(rates, key=lambda side: median(rates[side]))]
    return [
        side for side, of_side in rates.items() if side in always or lower_bound(ratios(best, of_side)) <= 1.0 / least
    ]


def mixed(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """The kinds in turn: code, maths, editing, code, …"""
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [group[i] for i in range(max(map(len, groups.values()))) for group in groups.values() if i < len(group)]


def endless(prompts: Sequence[tuple[int, ...]], params: SamplingParams, first: int) -> Iterator[Job]:
    """Requests for the prompts in turn, from number ``first`` on, without end."""
    for i in count(first):
        yield Job(prompts[i % len(prompts)], params)


def open_sides(
    model: str, draft_model: str, fixed: Sequence[int], policy: str, at_once: int, stack: ExitStack, progress: Tell
) -> dict[str, Engine]:
    """An engine each for plain decoding, every fixed length, and the policy.

    Args:
        at_once: most requests.
    """
    names = [PLAIN, *(f"constant:{k}" for k in fixed), policy]
    specs = {name: parse_policy(name, draft_model) for name in names}
    engines = {}
    load = SharedModels()
    for done, (name, spec) in enumerate(specs.items()):
        progress("loading", done, len(specs))
        rows = max(1024, at_once * (max(fixed) + 1))
        engines[name] = open_engine(model, spec, load=load, max_num_seqs=at_once, max_num_batched_tokens=rows)
        stack.callback(engines[name].close)
    progress("loading", len(specs), len(specs))
    return engines


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


class SideProcess:
    """A process that answers lines of JSON, which says ``{"ready": version}`` first.

    Args:
        name: what messages call it.
        log: gets what it prints on standard error; None = this process's own.

    Raises:
        DynaspecError: the process did not start, or has ended.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path | None = None) -> None:
        self.name = name
        self._log = log
        with ExitStack() as stack:
            errors = None if log is None else stack.enter_context(log.open("w"))
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def wait_ready(self) -> str:
        """The version of what it runs, when that has been loaded."""
        return str(self._answer()["ready"])

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a line and waits for the answer."""
        if self._process.stdin is None:  # never: it was asked for
            raise DynaspecError(f"the process of {self.name} cannot be written to")
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            lines = [] if self._log is None else self._log.read_text(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "what it printed says why"
            raise DynaspecError(f"the process of {self.name} has ended: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer
