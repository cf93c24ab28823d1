"""Load tests of several servers over several loads, in rounds: measured, summarised, as tables."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from dynaspec.bench.offline import rotated
from dynaspec.bench.provenance import provenance
from dynaspec.contract.errors import ConfigError
from dynaspec.control.policies.short_names import PolicySpec
from dynaspec.result_output import Tell, as_markdown, new_table

from .load import FinishedLoad, run_load_test
from .report import SCHEMA, figures, remarks
from .server import LoadSettings, ServerError, Target, connect

HOST = "127.0.0.1"
_KEYS = "DYNASPEC_API_KEY"
"""A server that only this process can know of needs no keys."""
_POLL_S = 0.5
_STOP_S = 60.0
"""What a server gets to finish after it was asked to stop."""
Start = Callable[[], AbstractAsyncContextManager[Target]]
"""Starts a server, or finds it running; gives where requests go."""
_WARM_UP_ROUNDS = 2
"""Times the largest number of requests at once that a new server answers before it is measured."""
KIND = "sweep"
_COLUMNS = (
    "medians over the rounds, times in milliseconds; tokens/s: output tokens of all requests; / first: over those of "
    "the first side in the same round; TTFT, TPOT, E2E: of the median request; good/s: requests a second within the "
    "goodput's limits; length: tokens per step with a draft"
)


def serve_command(model: str, spec: PolicySpec, port: int, further: Sequence[str]) -> list[str]:
    """The command line of a server under a policy.

    Args:
        further: options of ``dynaspec serve``, which come last.
    """
    command = [sys.executable, "-m", "dynaspec", "serve", model, "--host", HOST, "--port", str(port)]
    if spec.config is not None:
        given = spec.config.model_dump(mode="json", exclude_none=True)
        command += ["--speculative-config", json.dumps(given)]
    return [*command, *further]


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@asynccontextmanager
async def launched(
    name: str, command: Sequence[str], root: str, log: Path, timeout_s: float
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server process that runs as long as the context; it has listed its models when the context begins.

    Args:
        name: what messages call it.
        root: where it will listen.
        log: receives what it writes.

    Raises:
        ServerError: it ended, or was not ready in time; the message has the last line that it wrote.
        ConfigError: the log cannot be written.
    """
    try:
        output = log.open("wb")
    except OSError as error:
        raise ConfigError(f"the log {log} cannot be written: {error.strerror}") from None
    environment = {name: value for name, value in os.environ.items() if name != _KEYS}
    with output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=asyncio.subprocess.STDOUT, env=environment
        )
        try:
            await _wait(name, process, root, log, timeout_s)
            yield process
        finally:
            await _stop(process)


async def _wait(name: str, process: asyncio.subprocess.Process, root: str, log: Path, timeout_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with connect(Target(root=root)) as server:
        while process.returncode is None:
            try:
                if await server.models():
                    return
            except ServerError:
                pass  # it does not listen yet
            if asyncio.get_running_loop().time() >= deadline:
                raise ServerError(f"the server of {name} was not ready after {timeout_s:g} s, see {log}")
            await asyncio.sleep(_POLL_S)
    raise ServerError(f"the server of {name} ended with code {process.returncode}: {_last_line(log)}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"it wrote nothing to {log}"


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load."""

    max_concurrency: int | None
    request_rate: float = math.inf

    @property
    def label(self) -> str:
        """``16`` requests at once, ``2/s``, or both."""
        parts = [] if math.isinf(self.request_rate) else [f"{self.request_rate:g}/s"]
        return " ".join(parts + ([] if self.max_concurrency is None else [str(self.max_concurrency)])) or "all"


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep measures."""

    points: tuple[LoadPoint, ...]
    rounds: int = 1
    prompts_per_client: int = 4
    """A load of so many requests at once sends at least so many times as many, or a tail with few would count."""
    one_at_a_time: bool = False
    """Only one server is there at a time, and is started anew for every round; else all of them are, all the time."""

    def __post_init__(self) -> None:
        if not self.points or self.rounds < 1 or self.prompts_per_client < 1:
            raise ConfigError(
                f"there are {len(self.points)} loads, {self.rounds} rounds and {self.prompts_per_client} prompts per "
                "client; expected at least one of each"
            )


@dataclass(frozen=True, slots=True)
class Cell:
    """One side at one load in one round."""

    side: str
    point: LoadPoint
    round: int
    finished: FinishedLoad


def make_points(concurrencies: Sequence[int], rates: Sequence[float]) -> tuple[LoadPoint, ...]:
    """Every concurrency with every rate; either may be left out."""
    limits: Sequence[int | None] = concurrencies or [None]
    return tuple(LoadPoint(limit, rate) for rate, limit in product(rates or [math.inf], limits))


async def run_sweep(
    settings: LoadSettings,
    sides: Mapping[str, Start],
    plan: SweepPlan,
    progress: Tell,
    on_cell: Callable[[Cell], None],
) -> list[Cell]:
    """Measures every side at every load, in an order of the sides that moves on from round to round.

    All sides answer the same prompts at a load in a round; those of other loads and rounds are drawn anew, so that a
    prefix cache helps only as far as the data set is small.

    Args:
        settings: its target and its traffic are replaced.
        sides: name → how to start it.
        on_cell: told what has been measured as soon as it is.

    Raises:
        ServerError, ConfigError: see ``run_load_test``.
    """
    cells: list[Cell] = []
    shown = {point: _Bar(progress, point, plan.rounds * len(sides)) for point in plan.points}
    async with AsyncExitStack() as everything:
        servers = _Servers(sides, settings, plan, progress, everything)
        for turn, side, point in _order(list(sides), plan):
            target = await servers.target(side, turn)
            finished = await run_load_test(_at(settings, target, point, turn, plan), shown[point].tell)
            cells.append(Cell(side, point, turn, finished))
            shown[point].next()
            on_cell(cells[-1])
    return cells


class _Bar:
    """Progress at one load, over all rounds and sides: in percent, as numbers of requests are known only on the way."""

    def __init__(self, progress: Tell, point: LoadPoint, cells: int) -> None:
        self._progress = progress
        self._stage = f"load {point.label}"
        self._cells = cells
        self._done = 0

    def tell(self, _stage: str, done: int, total: int) -> None:
        """How far the present load test is."""
        self._progress(self._stage, round(100 * (self._done + done / total) / self._cells), 100)

    def next(self) -> None:
        """The present load test has ended."""
        self._done += 1
        self.tell("", 0, 1)


class _Servers:
    """Starts servers when they are first needed; all of them end with the stack."""

    def __init__(
        self,
        sides: Mapping[str, Start],
        settings: LoadSettings,
        plan: SweepPlan,
        progress: Tell,
        everything: AsyncExitStack,
    ) -> None:
        self._sides = sides
        self._settings = settings
        self._plan = plan
        self._progress = progress
        self._everything = everything
        self._targets: dict[tuple[str, int], Target] = {}
        self._current = AsyncExitStack()

    async def target(self, side: str, turn: int) -> Target:
        """Where the side's server is; started and warmed up if it is not there."""
        key = (side, turn if self._plan.one_at_a_time else 0)
        if key not in self._targets:
            if self._plan.one_at_a_time:
                await self._current.aclose()
                self._current = AsyncExitStack()
                self._everything.push_async_exit(self._current)
            self._progress(f"{side}: start", 0, 1)
            stack = self._current if self._plan.one_at_a_time else self._everything
            self._targets[key] = await stack.enter_async_context(self._sides[side]())
            await self._warm_up(self._targets[key])
            self._progress(f"{side}: start", 1, 1)
        return self._targets[key]

    async def _warm_up(self, target: Target) -> None:
        """Other prompts than those that are measured, at the largest load."""
        busiest = max(self._plan.points, key=lambda point: (point.max_concurrency or 0, point.request_rate))
        workload = replace(
            self._settings.workload,
            num_prompts=_WARM_UP_ROUNDS * (busiest.max_concurrency or 1),
            seed=self._settings.workload.seed + self._plan.rounds * len(self._plan.points),
        )
        traffic = replace(self._settings.traffic, max_concurrency=busiest.max_concurrency, request_rate=math.inf)
        settings = replace(self._settings, target=target, workload=workload, traffic=traffic)
        await run_load_test(settings, lambda stage, done, total: None)


def _order(sides: Sequence[str], plan: SweepPlan) -> Iterator[tuple[int, str, LoadPoint]]:
    """(round, side, load): sides in turn at every load, or all loads of a side where only one server is there."""
    for turn in range(plan.rounds):
        in_turn = rotated(sides, turn)
        if plan.one_at_a_time:
            yield from ((turn, side, point) for side in in_turn for point in plan.points)
        else:
            yield from ((turn, side, point) for point in plan.points for side in in_turn)


def _at(settings: LoadSettings, target: Target, point: LoadPoint, turn: int, plan: SweepPlan) -> LoadSettings:
    workload = settings.workload
    drawn = turn * len(plan.points) + plan.points.index(point)
    least = plan.prompts_per_client * (point.max_concurrency or 1)
    return replace(
        settings,
        target=target,
        workload=replace(workload, num_prompts=max(workload.num_prompts, least), seed=workload.seed + drawn),
        traffic=replace(settings.traffic, max_concurrency=point.max_concurrency, request_rate=point.request_rate),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """A side at a load. Times are in milliseconds; all None where nothing was measured."""

    side: str
    point: LoadPoint
    output_tokens_per_s: float
    """Of all requests together."""
    over_first: float | None
    """Of them, over those of the first side in the same round."""
    ttft_ms: float | None
    """The median request's, as the two that follow."""
    tpot_ms: float | None
    e2el_ms: float | None
    tail_e2el_ms: float | None
    """Of the highest percentile that is reported."""
    goodput: float | None
    """Requests a second that met every goal; None without goals."""
    acceptance_length: float | None
    """By the server's counters, as the rate; None without drafts."""
    acceptance_rate: float | None
    failed: int
    """In all rounds."""


def summarise(cells: Sequence[Cell]) -> list[SweepRow]:
    """A row for every side at every load that was measured, load by load."""
    first_round = [cell for cell in cells if cell.round == 0]
    sides = list(dict.fromkeys(cell.side for cell in first_round))
    points = dict.fromkeys(cell.point for cell in first_round)
    return [_row(side, point, sides[0], cells) for point in points for side in sides if _of(cells, side, point)]


def tail_of(cells: Sequence[Cell]) -> float:
    """The highest percentile that is reported."""
    return max(cells[0].finished.settings.reported.percentiles)


def _row(side: str, point: LoadPoint, first: str, cells: Sequence[Cell]) -> SweepRow:
    mine = _of(cells, side, point)
    theirs = {cell.round: _speed(cell.finished) for cell in _of(cells, first, point)}
    ratios = [_speed(cell.finished) / speed for cell in mine if (speed := theirs.get(cell.round))]
    runs = [cell.finished for cell in mine]

    def middle(value: Callable[[FinishedLoad], float | None]) -> float | None:
        return _median(value(run) for run in runs)

    return SweepRow(
        side=side,
        point=point,
        output_tokens_per_s=median(map(_speed, runs)),
        over_first=_median(ratios),
        ttft_ms=middle(lambda run: run.measured.spreads["ttft"].median),
        tpot_ms=middle(lambda run: run.measured.spreads["tpot"].median),
        e2el_ms=middle(lambda run: run.measured.spreads["e2el"].median),
        tail_e2el_ms=middle(lambda run: run.measured.spreads["e2el"].percentiles[tail_of(cells)]),
        goodput=middle(lambda run: None if run.measured.good is None else run.measured.per_second(run.measured.good)),
        acceptance_length=middle(lambda run: run.counters.mean_acceptance_length if run.counters else None),
        acceptance_rate=middle(lambda run: run.counters.draft_acceptance_rate if run.counters else None),
        failed=sum(len(run.measured.failures) for run in runs),
    )


def _of(cells: Sequence[Cell], side: str, point: LoadPoint) -> list[Cell]:
    return [cell for cell in cells if (cell.side, cell.point) == (side, point)]


def _speed(run: FinishedLoad) -> float:
    return run.measured.per_second(run.measured.output_tokens)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def as_document(cells: Sequence[Cell], options: Mapping[str, Any]) -> dict[str, Any]:
    """All cells with their figures, and their medians."""
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "provenance": provenance(),
        "options": dict(options),
        "summary": [asdict(row) | {"point": _point(row.point)} for row in summarise(cells)],
        "cells": [
            {"side": cell.side, "round": cell.round, "num_prompts": len(cell.finished.fitted.requests)}
            | _point(cell.point)
            | figures(cell.finished)
            | {"remarks": remarks(cell.finished)}
            for cell in cells
        ],
    }


def as_text(cells: Sequence[Cell]) -> str:
    """The medians as a Markdown table, and below it what must be known of them."""
    said = "".join(f"\n* {remark}" for remark in (_COLUMNS, *all_remarks(cells)))
    return f"{as_markdown(_shown(cells))}{said}\n"


def as_table(cells: Sequence[Cell]) -> Table:
    """The medians for a terminal."""
    rows, summaries = _shown(cells), summarise(cells)
    table = new_table("Medians over the rounds; times in ms", rows[0], left=("side",))
    for i, row in enumerate(rows):
        last_of_load = i + 1 == len(rows) or summaries[i + 1].point != summaries[i].point
        table.add_row(*("-" if value is None else value for value in row.values()), end_section=last_of_load)
    return table


def all_remarks(cells: Sequence[Cell]) -> list[str]:
    """Every remark once, with where it was first made."""
    found: dict[str, Cell] = {}
    for cell in cells:
        for remark in remarks(cell.finished):
            found.setdefault(remark, cell)
    return [f"{cell.side} at {cell.point.label}: {remark}" for remark, cell in found.items()]


def _shown(cells: Sequence[Cell]) -> list[dict[str, str | None]]:
    """Rows of column → text, times in milliseconds. Columns in which nothing was measured are left out."""
    rows = [_texts(row, tail_of(cells)) for row in summarise(cells)]
    kept = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    return [{name: row[name] for name in kept} for row in rows]


def _texts(row: SweepRow, tail: float) -> dict[str, str | None]:
    return {
        "load": row.point.label,
        "side": row.side,
        "tokens/s": _number(row.output_tokens_per_s, 1),
        "/ first": _number(row.over_first, 3),
        "TTFT": _number(row.ttft_ms, 1),
        "TPOT": _number(row.tpot_ms, 2),
        "E2E": _number(row.e2el_ms, 0),
        f"p{tail:g} E2E": _number(row.tail_e2el_ms, 0),
        "good/s": _number(row.goodput, 2),
        "length": _number(row.acceptance_length, 2),
        "accepted": None if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
        "failed": str(row.failed) if row.failed else None,
    }


def _point(point: LoadPoint) -> dict[str, Any]:
    rate = "inf" if math.isinf(point.request_rate) else point.request_rate
    return {"max_concurrency": point.max_concurrency, "request_rate": rate}


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
