"""The style of all pictures. Only they need matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dynaspec.contract.errors import ConfigError

INK, GREY, LIGHT_GREY = "#2f3640", "#9aa5b1", "#b9c2cc"
BLUE, GOLD, GREEN, RED = "#3b7dc4", "#e3a857", "#2a9d6f", "#c8553d"
SERIES = (BLUE, GOLD, GREEN, RED, "#8d6cc0", "#4aa8b5", "#b07a4f", "#d07fa8", "#7f8c3a", "#5b6570")
DASHED = (0, (4, 3))
"""Style of lines that mark a value."""
_RULE, _EDGE = "#e6e9ed", "#b8c0ca"


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure, in inches, with a title at its left."""
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, color=INK)
    return figure


def tidy(
    ax: Axes,
    title: str,
    xlabel: str = "",
    ylabel: str = "",
    *,
    rules: Literal["x", "y"] = "y",
    ink: str = INK,
    rule: str = _RULE,
    edge: str = _EDGE,
) -> None:
    """Title, labels and light rules.

    Args:
        rules: the axis whose values they mark.
        ink: colour of text; ``rule`` and ``edge`` are those of the rules and of the lower edge.
    """
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=ink)
    ax.set_xlabel(xlabel, fontsize=9, color=ink)
    ax.set_ylabel(ylabel, fontsize=9, color=ink)
    ax.set_facecolor("none")
    ax.tick_params(labelsize=8.5, colors=ink, length=0)
    ax.grid(axis=rules, color=rule, linewidth=0.8, zorder=0)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(edge)


def series_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each of the names, in their order."""
    return {name: SERIES[i % len(SERIES)] for i, name in enumerate(dict.fromkeys(names))}


def save_png(figure: Figure, path: Path) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        FigureCanvasAgg(figure).print_png(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ConfigError(f"the picture {path} cannot be written: {error.strerror}") from None
