"""A sweep as a picture: speed, latency, both against each other, and acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from dynaspec.bench.style import GREY, INK, SERIES, new_figure, save_png, tidy

from .sweep import Point
from .sweep_summary import Row

Value = Callable[[Row], float | None]


def plot_sweep(rows: Sequence[Row], path: Path, title: str) -> None:
    """Writes a PNG of four panels, with a line for every side.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(11, 8, title)
    axes = figure.subplots(2, 2).flatten()
    points = list(dict.fromkeys(row.point for row in rows))
    load = _axis(points)
    _by_load(axes[0], rows, points, lambda row: row.output_tokens_per_s)
    tidy(axes[0], "Throughput", load, "output tokens per second")
    _by_load(axes[1], rows, points, lambda row: row.tpot_ms)
    tidy(axes[1], "Time per output token", load, "milliseconds, median request")
    _against(axes[2], rows)
    tidy(axes[2], "Latency against throughput", "output tokens per second", "end to end, seconds, median request")
    if any(row.acceptance_length is not None for row in rows):
        _by_load(axes[3], rows, points, lambda row: row.acceptance_length)
        tidy(axes[3], "Acceptance", load, "tokens per step with a draft")
        axes[3].set_ylim(bottom=1)
    else:
        axes[3].text(0.5, 0.5, "no drafts", ha="center", color=GREY, transform=axes[3].transAxes)
        axes[3].set_axis_off()
    for ax in axes[:3]:
        ax.set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8.5)
    save_png(figure, path)


def _by_load(ax: Axes, rows: Sequence[Row], points: Sequence[Point], value: Value) -> None:
    for side, colour in _colours(rows).items():
        known = [
            (points.index(row.point), found) for row in rows if row.side == side and (found := value(row)) is not None
        ]
        if known:
            ax.plot(*zip(*known, strict=True), "o-", color=colour, linewidth=1.8, markersize=5, label=side)
    ax.set_xticks(range(len(points)), [point.label for point in points])


def _against(ax: Axes, rows: Sequence[Row]) -> None:
    """A point a load, which is written beside it."""
    for side, colour in _colours(rows).items():
        known = [row for row in rows if row.side == side and row.e2el_ms is not None]
        places = [(row.output_tokens_per_s, (row.e2el_ms or 0.0) / 1e3) for row in known]
        if not places:
            continue
        ax.plot(*zip(*places, strict=True), "o-", color=colour, linewidth=1.8, markersize=5, label=side)
        for row, place in zip(known, places, strict=True):
            ax.annotate(row.point.label, place, xytext=(4, 4), textcoords="offset points", fontsize=7.5, color=INK)
    ax.set_xlim(left=0)


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    sides = dict.fromkeys(row.side for row in rows)
    return {side: SERIES[i % len(SERIES)] for i, side in enumerate(sides)}


def _axis(points: Sequence[Point]) -> str:
    limited = any(point.max_concurrency is not None for point in points)
    rated = len({point.request_rate for point in points}) > 1
    if limited and rated:
        return "requests per second, and most at once"
    return "requests per second" if rated else "requests at once"
