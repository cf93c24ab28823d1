"""A comparison as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from dynaspec.control.policies.short_names import PLAIN
from dynaspec.pictures import DASHED, GREY, INK, LIGHT_GREY, new_figure, save_png, series_colours, tidy

from .comparison import SimulatedResult, course
from .policies import ORACLES


def plot_comparison(results: Sequence[SimulatedResult], path: Path, title: str) -> None:
    """Writes a PNG of four panels: throughput, latency, and draft length and load over time.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(11, 7.2, title)
    axes = figure.subplots(2, 2).flatten()
    colours = _colours(results)
    _throughput(axes[0], results, colours)
    _per_token(axes[1], results, colours)
    _over_time(axes[2], axes[3], results, colours)
    handles, labels = axes[3].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(7, len(labels)), frameon=False, fontsize=9)
    save_png(figure, path)


def _colours(results: Sequence[SimulatedResult]) -> dict[str, str]:
    """Plain decoding and the oracles in grey, the policies in colour."""
    grey = {PLAIN: GREY} | dict.fromkeys(ORACLES, LIGHT_GREY)
    return series_colours(result.name for result in results if result.name not in grey) | grey


def _throughput(ax: Axes, results: Sequence[SimulatedResult], colours: dict[str, str]) -> None:
    values = [result.totals.tokens_per_second for result in results]
    names = [result.name for result in results]
    bars = ax.barh(names, values, 0.7, color=[colours[name] for name in names], zorder=2)
    plain = next(result.totals.tokens_per_second for result in results if result.name == PLAIN)
    ax.bar_label(bars, [f"{v:,.0f}  ({v / plain:.2f} ×)" for v in values], fontsize=8, padding=3, color=INK)
    ax.axvline(plain, color=INK, linewidth=0.8, linestyle=DASHED, zorder=3)
    ax.invert_yaxis()
    ax.margins(x=0.3)
    tidy(ax, "Output", "tokens a second", rules="x")


def _per_token(ax: Axes, results: Sequence[SimulatedResult], colours: dict[str, str]) -> None:
    names = [result.name for result in results]
    for row, result in enumerate(results):
        values = 1e3 * result.totals.per_token_s()
        if not len(values):
            continue
        low, middle, high = np.percentile(values, (10, 50, 99))
        ax.plot([low, high], [row, row], color=colours[result.name], linewidth=2.2, zorder=2, solid_capstyle="round")
        ax.plot(middle, row, "o", color=colours[result.name], markersize=7, zorder=3)
        ax.annotate(f"{middle:.1f}", (middle, row), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.7)
    ax.set_xlim(left=0)
    tidy(ax, "Time per output token", "ms; median request, line from the 10th to the 99th percentile", rules="x")


def _over_time(lengths: Axes, load: Axes, results: Sequence[SimulatedResult], colours: dict[str, str]) -> None:
    for result in results:
        line = course(result.totals)
        style = {"oracle": ":", "oracle:cost": "--"}.get(result.name, "-")
        options = {"color": colours[result.name], "linewidth": 1.5, "linestyle": style, "label": result.name}
        lengths.plot(line.at_s, line.draft_length, **options)  # type: ignore[arg-type]
        load.plot(line.at_s, line.requests, **options)  # type: ignore[arg-type]
    for ax in (lengths, load):
        ax.set_ylim(bottom=0)
        ax.set_xlim(left=0)
    tidy(lengths, "Draft length over time", "seconds", "tokens drafted a request and step")
    tidy(load, "Load over time", "seconds", "requests decoding on a node")
