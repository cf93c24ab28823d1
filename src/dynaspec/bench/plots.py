"""The pictures of all measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from dynaspec.control.policies.short_names import PLAIN
from dynaspec.control.profile import Profile
from dynaspec.pictures import (
    BLUE,
    DASHED,
    GOLD,
    GREEN,
    GREY,
    INK,
    LIGHT_GREY,
    SERIES,
    new_figure,
    save_png,
    series_colours,
    tidy,
)

from .demo import Summary, name_of
from .methods import with_total
from .offline import Session
from .oracle import HINDSIGHT, ORACLE, TaskResult
from .profiling import best_length, goodput
from .serving.sweep import LoadPoint, SweepRow

_DEMO_COLOURS = (GREY, GOLD, "#7aa6d8", GREEN)
"""Of the ways, in their order."""
_MOST_BARS = 42
"""In a line of the picture, gaps between groups counted."""
_WASTED = "#f0cfc6"
Value = Callable[[SweepRow], float | None]


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    unit: str
    quantity: Callable[[Summary], float]
    label: str = "{:.2f}"
    """Format of the figure over a bar."""
    with_plain: bool = True
    """Whether plain decoding has this quantity."""


_DEMO_PANELS = (
    _Panel("Speed", "tokens per second", lambda s: s.tokens_per_second, "{:.0f}"),
    _Panel("Speed-up over plain decoding", "times", lambda s: s.speedup),
    _Panel("Acceptance length", "tokens per step with a draft", lambda s: s.acceptance_length or 0.0, with_plain=False),
    _Panel("Wasted drafts", "rejected drafts per token of output", lambda s: s.wasted, with_plain=False),
)


def plot_summaries(summaries: Mapping[str, Mapping[str, Summary]], path: Path, title: str) -> None:
    """Writes a PNG of four panels: bars for every policy, grouped by kind of prompt.

    Args:
        summaries: kind of prompt → policy → summary.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(14, 7.2, title + "\n")
    axes = figure.subplots(2, 2).flatten()
    ways = list(next(iter(summaries.values())))
    colours = {name_of(way): colour for way, colour in zip(ways, _DEMO_COLOURS, strict=True)}
    for ax, panel in zip(axes, _DEMO_PANELS, strict=True):
        shown = [way for way in ways if panel.with_plain or way != PLAIN]
        heights = {name_of(way): [panel.quantity(kind[way]) for kind in summaries.values()] for way in shown}
        _draw_groups(ax, heights, colours, panel.label)
        tidy(ax, panel.title, "", panel.unit)
        ax.set_xticks(range(len(summaries)), list(summaries), fontsize=10, color=INK)
        ax.margins(y=0.14)
    axes[1].axhline(1.0, color=INK, linewidth=0.8, linestyle=DASHED, zorder=1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=10)
    save_png(figure, path)


def plot_categories(session: Session, path: Path, model: str, title: str) -> None:
    """Writes a PNG: a group of bars for every kind of prompt, a bar for every way.

    Raises:
        ConfigError: the file cannot be written.
    """
    speedups = with_total(session)
    ways, categories = [name for name in speedups if name != PLAIN], list(speedups[PLAIN])
    per_line = max(1, int(_MOST_BARS / (len(ways) + 1)))
    lines = [categories[i : i + per_line] for i in range(0, len(categories), per_line)]
    size = max(8.0, 1.5 + 0.28 * len(lines[0]) * (len(ways) + 1)), 1.4 + 3.0 * len(lines)
    figure = new_figure(*size, f"{model}: speed-up over plain decoding")
    panels = figure.subplots(len(lines), 1, sharey=True, squeeze=False)[:, 0]
    colours = series_colours(ways)
    for ax, shown in zip(panels, lines, strict=True):
        _draw_groups(ax, {name: [speedups[name][category] for category in shown] for name in ways}, colours)
        ax.axhline(1.0, color=LIGHT_GREY, linewidth=1.0, linestyle=DASHED, zorder=1)
        tidy(ax, title if ax is panels[0] else "", "", "times")
        ax.set_xticks(range(len(shown)), shown, fontsize=9, color=INK)
        ax.set_xlim(-0.6, len(lines[0]) - 0.4)  # bars of all lines are as wide
        ax.margins(y=0.18)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9
    )
    save_png(figure, path)


def _draw_groups(
    ax: Axes, heights: Mapping[str, Sequence[float]], colours: Mapping[str, str], label: str = "{:.2f}"
) -> None:
    """A bar for every way in each group."""
    width = 0.8 / len(heights)
    for i, (name, of_way) in enumerate(heights.items()):
        places = [x + (i - (len(heights) - 1) / 2) * width for x in range(len(of_way))]
        bars = ax.bar(places, of_way, 0.9 * width, color=colours[name], label=name, zorder=2)
        ax.bar_label(bars, [label.format(height) for height in of_way], fontsize=6.5, padding=2, color=INK)


def plot_iterations(result: TaskResult, sides: Sequence[str], path: Path) -> None:
    """Writes a PNG of the first text with a panel a side: a bar a step, its accepted tokens at the bottom, those
    drafted in vain on top.

    Raises:
        ConfigError: the file cannot be written.
    """
    title = f"{result.name}, prompt 1: tokens drafted in each step"
    figure = new_figure(10, 1.2 + 1.75 * len(sides), title)
    axes = figure.subplots(len(sides), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for ax, side in zip(axes, sides, strict=True):
        steps = result.line(side).walks[0]
        places = range(1, len(steps) + 1)
        accepted = [step.accepted for step in steps]
        wasted = [step.drafted - step.accepted for step in steps]
        ax.bar(places, accepted, 0.82, color=GREEN if side == ORACLE else BLUE, label="accepted")
        ax.bar(places, wasted, 0.82, bottom=accepted, color=_WASTED, label="drafted in vain")
        empty = [place for place, step in zip(places, steps, strict=True) if step.drafted == 0]
        ax.plot(empty, [0.15] * len(empty), "|", color=GREY, markersize=6)
        passes = f"{len(steps)} target and {sum(s.drafted for s in steps)} drafter passes"
        tidy(ax, f"{side}: {passes}", "", "tokens")
    axes[0].legend(frameon=False, fontsize=8.5, ncols=2, loc="upper right")
    axes[-1].set_xlabel("step", fontsize=9, color=INK)
    save_png(figure, path)


def plot_speeds(results: Sequence[TaskResult], path: Path, title: str) -> None:
    """Writes a PNG with a panel a task: tokens/s of every side, computed from its steps; a dot where it was measured.

    Raises:
        ConfigError: the file cannot be written.
    """
    sides = [line.side for line in results[0].lines]
    figure = new_figure(4.1 * len(results) + 1.5, 1.3 + 0.27 * len(sides), title)
    axes = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for ax, result in zip(axes, results, strict=True):
        _speeds(ax, result, sides)
    save_png(figure, path)


def _speeds(ax: Axes, result: TaskResult, sides: Sequence[str]) -> None:
    lines = [result.line(side) for side in sides]
    places = list(range(len(sides)))[::-1]
    ax.barh(
        places, [line.computed for line in lines], 0.74, color=[_oracle_colour(s, result.best_fixed) for s in sides]
    )
    measured = [(line.measured, place) for line, place in zip(lines, places, strict=True) if line.measured is not None]
    ax.plot([m for m, _ in measured], [p for _, p in measured], "o", color=INK, markersize=3.5, label="measured")
    ax.set_yticks(places, sides)
    tidy(ax, f"{result.name} ({result.prompts})", "tokens per second")
    ax.grid(axis="y", visible=False)
    ax.axvline(result.line(result.best_fixed).computed, color=INK, linewidth=0.8, linestyle=DASHED)
    ax.legend(frameon=False, fontsize=8, loc="lower right")


def _oracle_colour(side: str, best_fixed: str) -> str:
    if side == ORACLE:
        return GREEN
    if side in HINDSIGHT:
        return "#a9d8c6"
    if side == best_fixed:
        return BLUE
    if side == PLAIN or side.startswith("constant:"):
        return "#c3d6ea"
    return GOLD


def plot_profile(profile: Profile, path: Path, title: str) -> None:
    """Writes a PNG: step time over batch size by draft length; goodput over draft length by batch size, as speed-up.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(11, 4.4, title)
    left, right = figure.subplots(1, 2)
    _step_times(left, profile)
    _profile_speedups(right, profile)
    save_png(figure, path)


def _step_times(ax: Axes, profile: Profile) -> None:
    batches = list(profile.batch_stats)
    for k, colour in zip(next(iter(profile.batch_stats.values())), SERIES * 10, strict=False):
        times = [profile.batch_stats[batch][k] for batch in batches]
        ax.plot(batches, times, "o-", color=colour, linewidth=1.6, markersize=4, label=f"k = {k}")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.legend(frameon=False, fontsize=8.5)
    tidy(ax, "Inter-token latency of a step", "requests that decode", "ms")


def _profile_speedups(ax: Axes, profile: Profile) -> None:
    lengths = list(range(profile.max_num_speculative_tokens + 1))
    for batch, colour in zip(profile.batch_stats, SERIES * 10, strict=False):
        curve = [goodput(profile, batch, k) / goodput(profile, batch, 0) for k in lengths]
        best = best_length(profile, batch)
        ax.plot(lengths, curve, color=colour, linewidth=1.6, label=f"batch {batch}")
        ax.plot(best, curve[best], "o", color=colour, markersize=6)
    ax.axhline(1.0, color=INK, linewidth=0.8, linestyle=DASHED)
    ax.set_xticks(lengths)
    ax.legend(frameon=False, fontsize=8.5)
    tidy(ax, "Goodput over that of plain decoding", "draft length k (dot: the best)", "times")


def plot_sweep(rows: Sequence[SweepRow], path: Path, title: str) -> None:
    """Writes a PNG of four panels, with a line for every side.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(11, 8, title)
    axes = figure.subplots(2, 2).flatten()
    points = list(dict.fromkeys(row.point for row in rows))
    load = _load_axis(points)
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


def _by_load(ax: Axes, rows: Sequence[SweepRow], points: Sequence[LoadPoint], value: Value) -> None:
    for side, colour in series_colours(row.side for row in rows).items():
        known = [
            (points.index(row.point), found) for row in rows if row.side == side and (found := value(row)) is not None
        ]
        if known:
            ax.plot(*zip(*known, strict=True), "o-", color=colour, linewidth=1.8, markersize=5, label=side)
    ax.set_xticks(range(len(points)), [point.label for point in points])


def _against(ax: Axes, rows: Sequence[SweepRow]) -> None:
    """A point a load, which is written beside it."""
    for side, colour in series_colours(row.side for row in rows).items():
        known = [row for row in rows if row.side == side and row.e2el_ms is not None]
        places = [(row.output_tokens_per_s, (row.e2el_ms or 0.0) / 1e3) for row in known]
        if not places:
            continue
        ax.plot(*zip(*places, strict=True), "o-", color=colour, linewidth=1.8, markersize=5, label=side)
        for row, place in zip(known, places, strict=True):
            ax.annotate(row.point.label, place, xytext=(4, 4), textcoords="offset points", fontsize=7.5, color=INK)
    ax.set_xlim(left=0)


def _load_axis(points: Sequence[LoadPoint]) -> str:
    limited = any(point.max_concurrency is not None for point in points)
    rated = len({point.request_rate for point in points}) > 1
    if limited and rated:
        return "requests per second, and most at once"
    return "requests per second" if rated else "requests at once"
