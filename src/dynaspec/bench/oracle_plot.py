"""The oracle study as pictures: each step of a text as a bar, and every side's speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from dynaspec.control.policies.short_names import PLAIN

from .oracle import ORACLE, TaskResult
from .oracle_report import HINDSIGHT
from .style import BLUE, GOLD, GREEN, GREY, INK, new_figure, save_png, tidy

_WASTED = "#f0cfc6"


def plot_iterations(result: TaskResult, sides: Sequence[str], path: Path, text: int = 0) -> None:
    """Writes a PNG with a panel a side: a bar a step, its accepted tokens at the bottom, those drafted in vain on top.

    Raises:
        ConfigError: the file cannot be written.
    """
    title = f"{result.name}, prompt {text + 1}: tokens drafted in each step"
    figure = new_figure(10, 1.2 + 1.75 * len(sides), title)
    axes = figure.subplots(len(sides), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for ax, side in zip(axes, sides, strict=True):
        steps = result.line(side).walks[text]
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
    ax.barh(places, [line.computed for line in lines], 0.74, color=[_colour(s, result.best_fixed) for s in sides])
    measured = [(line.measured, place) for line, place in zip(lines, places, strict=True) if line.measured is not None]
    ax.plot([m for m, _ in measured], [p for _, p in measured], "o", color=INK, markersize=3.5, label="measured")
    ax.set_yticks(places, sides)
    tidy(ax, f"{result.name} ({result.prompts})", "tokens per second", "")
    ax.grid(axis="y", visible=False)
    ax.axvline(result.line(result.best_fixed).computed, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    ax.legend(frameon=False, fontsize=8, loc="lower right")


def _colour(side: str, best_fixed: str) -> str:
    if side == ORACLE:
        return GREEN
    if side in HINDSIGHT:
        return "#a9d8c6"
    if side == best_fixed:
        return BLUE
    if side == PLAIN or side.startswith("constant:"):
        return "#c3d6ea"
    return GOLD
