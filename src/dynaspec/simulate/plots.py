"""A comparison as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dynaspec.contract.errors import ConfigError
from dynaspec.control.policies.short_names import PLAIN

from .comparison import SimulatedResult
from .metrics import course
from .policies import ORACLES

_COLOURS = (
    "#4c78a8",
    "#e3a857",
    "#2a9d6f",
    "#d1605e",
    "#8a6fb0",
    "#56b4c9",
    "#b07d62",
    "#d48fb8",
    "#7f8c3a",
    "#3d5a6c",
)
_GREY, _LIGHT, _INK = "#9aa5b1", "#b9c2cc", "#2f3640"


def plot_comparison(results: Sequence[SimulatedResult], path: Path, title: str) -> None:
    """Writes a PNG of four panels: throughput, latency, and draft length and load over time.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = Figure(figsize=(11, 7.2), dpi=110, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).flatten()
    colours = _colours(results)
    _throughput(axes[0], results, colours)
    _per_token(axes[1], results, colours)
    _over_time(axes[2], axes[3], results, colours)
    handles, labels = axes[3].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(7, len(labels)), frameon=False, fontsize=9)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, color=_INK)
    try:
        canvas.print_png(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from None


def _colours(results: Sequence[SimulatedResult]) -> dict[str, str]:
    """Plain decoding and the oracles in grey, the policies in colour."""
    names = [result.name for result in results]
    coloured = [name for name in names if name != PLAIN and name not in ORACLES]
    palette = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(coloured)}
    return {name: palette.get(name, _GREY if name == PLAIN else _LIGHT) for name in names}


def _throughput(ax: Axes, results: Sequence[SimulatedResult], colours: dict[str, str]) -> None:
    values = [result.totals.tokens_per_second for result in results]
    names = [result.name for result in results]
    bars = ax.barh(names, values, 0.7, color=[colours[name] for name in names], zorder=2)
    plain = next(result.totals.tokens_per_second for result in results if result.name == PLAIN)
    ax.bar_label(bars, [f"{v:,.0f}  ({v / plain:.2f} ×)" for v in values], fontsize=8, padding=3, color=_INK)
    ax.axvline(plain, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=3)
    ax.invert_yaxis()
    ax.margins(x=0.3)
    _finish(ax, "Output", "tokens a second", grid="x")


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
    _finish(ax, "Time per output token", "ms; median request, line from the 10th to the 99th percentile", grid="x")


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
    _finish(lengths, "Draft length over time", "seconds", grid="y")
    lengths.set_ylabel("tokens drafted a request and step", fontsize=8.5, color=_INK)
    _finish(load, "Load over time", "seconds", grid="y")
    load.set_ylabel("requests decoding on a node", fontsize=8.5, color=_INK)


def _finish(ax: Axes, title: str, unit: str, grid: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    ax.set_xlabel(unit, fontsize=8.5, color=_INK)
    ax.tick_params(labelsize=8.5, colors=_INK, length=0)
    ax.grid(axis=grid, color="#e6e9ed", linewidth=0.8, zorder=0)  # type: ignore[arg-type]
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#b8c0ca")
