"""The figures of a sweep: medians over its rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from .measures import Spread
from .run import Finished
from .sweep import Cell, Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A side at a load. Times are in milliseconds; all None where nothing was measured."""

    side: str
    point: Point
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


def summarise(cells: Sequence[Cell]) -> list[Row]:
    """A row for every side at every load that was measured, load by load."""
    first_round = [cell for cell in cells if cell.round == 0]
    sides = list(dict.fromkeys(cell.side for cell in first_round))
    points = dict.fromkeys(cell.point for cell in first_round)
    return [_row(side, point, sides[0], cells) for point in points for side in sides if _of(cells, side, point)]


def tail_of(cells: Sequence[Cell]) -> float:
    """The highest percentile that is reported."""
    return max(cells[0].finished.settings.reported.percentiles)


def _row(side: str, point: Point, first: str, cells: Sequence[Cell]) -> Row:
    mine = _of(cells, side, point)
    theirs = {cell.round: _speed(cell.finished) for cell in _of(cells, first, point)}
    ratios = [_speed(cell.finished) / speed for cell in mine if (speed := theirs.get(cell.round))]
    runs = [cell.finished for cell in mine]

    def middle(value: Callable[[Finished], float | None]) -> float | None:
        return _median(value(run) for run in runs)

    return Row(
        side=side,
        point=point,
        output_tokens_per_s=median(map(_speed, runs)),
        over_first=_median(ratios),
        ttft_ms=middle(lambda run: _spread(run, "ttft").median),
        tpot_ms=middle(lambda run: _spread(run, "tpot").median),
        e2el_ms=middle(lambda run: _spread(run, "e2el").median),
        tail_e2el_ms=middle(lambda run: _spread(run, "e2el").percentiles[tail_of(cells)]),
        goodput=middle(lambda run: None if run.measured.good is None else run.measured.per_second(run.measured.good)),
        acceptance_length=middle(lambda run: run.counters.acceptance_length if run.counters else None),
        acceptance_rate=middle(lambda run: run.counters.acceptance_rate if run.counters else None),
        failed=sum(len(run.measured.failures) for run in runs),
    )


def _of(cells: Sequence[Cell], side: str, point: Point) -> list[Cell]:
    return [cell for cell in cells if (cell.side, cell.point) == (side, point)]


def _speed(run: Finished) -> float:
    return run.measured.per_second(run.measured.output_tokens)


def _spread(run: Finished, name: str) -> Spread:
    return run.measured.spreads[name]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
