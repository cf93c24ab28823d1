"""A load test at several loads, against several servers in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from itertools import product

from dynaspec.contract.errors import ConfigError

from .run import Finished, run_load_test
from .settings import Settings, Target

Progress = Callable[[str, int, int], None]
Start = Callable[[], AbstractAsyncContextManager[Target]]
"""Starts a server, or finds it running; gives where requests go."""
_WARM_UP_ROUNDS = 2
"""Times the largest number of requests at once that a new server answers before it is measured."""


@dataclass(frozen=True, slots=True)
class Point:
    """One load."""

    max_concurrency: int | None
    request_rate: float = math.inf

    @property
    def label(self) -> str:
        """``16`` requests at once, ``2/s``, or both."""
        parts = [] if math.isinf(self.request_rate) else [f"{self.request_rate:g}/s"]
        return " ".join(parts + ([] if self.max_concurrency is None else [str(self.max_concurrency)])) or "all"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep measures."""

    points: tuple[Point, ...]
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
    point: Point
    round: int
    finished: Finished


def make_points(concurrencies: Sequence[int], rates: Sequence[float]) -> tuple[Point, ...]:
    """Every concurrency with every rate; either may be left out."""
    limits: Sequence[int | None] = concurrencies or [None]
    return tuple(Point(limit, rate) for rate, limit in product(rates or [math.inf], limits))


async def run_sweep(
    settings: Settings, sides: Mapping[str, Start], plan: Plan, progress: Progress, on_cell: Callable[[Cell], None]
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

    def __init__(self, progress: Progress, point: Point, cells: int) -> None:
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
        settings: Settings,
        plan: Plan,
        progress: Progress,
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
        await run_load_test(replace(self._settings, target=target, workload=workload, traffic=traffic), _silent)


def _order(sides: Sequence[str], plan: Plan) -> Iterator[tuple[int, str, Point]]:
    """(round, side, load): sides in turn at every load, or all loads of a side where only one server is there."""
    for turn in range(plan.rounds):
        first = turn % len(sides)
        rotated = (*sides[first:], *sides[:first])
        if plan.one_at_a_time:
            yield from ((turn, side, point) for side in rotated for point in plan.points)
        else:
            yield from ((turn, side, point) for point in plan.points for side in rotated)


def _at(settings: Settings, target: Target, point: Point, turn: int, plan: Plan) -> Settings:
    workload = settings.workload
    drawn = turn * len(plan.points) + plan.points.index(point)
    least = plan.prompts_per_client * (point.max_concurrency or 1)
    return replace(
        settings,
        target=target,
        workload=replace(workload, num_prompts=max(workload.num_prompts, least), seed=workload.seed + drawn),
        traffic=replace(settings.traffic, max_concurrency=point.max_concurrency, request_rate=point.request_rate),
    )


def _silent(stage: str, done: int, total: int) -> None:
    """Progress of a warm-up: none."""
