"""Figures as SVG that belongs to the page: its font, its ink, light or dark."""

from __future__ import annotations

import io
import re
import warnings
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

INK, FAINT = "#010203", "#040506"
"""Stand for the page's own colours, which are put in their place when the figure is written."""
BLUE, GOLD, GREEN, RED, GREY = "#3f83cf", "#d9992f", "#2a9d6f", "#cf5b45", "#8d99a6"
"""Of series: these can be read on white and on black."""
LENGTHS = LinearSegmentedColormap.from_list("lengths", [GREY, BLUE, "#7fb069", "#f2b134"])
IMAGE_DPI = 160


def new_figure(width: float, height: float) -> Figure:
    """In inches, without a background."""
    return Figure(figsize=(width, height), dpi=IMAGE_DPI, facecolor="none", layout="constrained")


def tidy(ax: Axes, title: str, xlabel: str = "", ylabel: str = "") -> None:
    """Title, labels and light rules."""
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    ax.set_xlabel(xlabel, fontsize=9, color=INK)
    ax.set_ylabel(ylabel, fontsize=9, color=INK)
    ax.set_facecolor("none")
    ax.tick_params(labelsize=8.5, colors=INK, length=0)
    ax.grid(axis="y", color=FAINT, linewidth=0.7, zorder=0)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(FAINT)


def legend(ax: Axes, **options: Any) -> None:
    """In one line at the right above the axes, where no curve is; ``options`` say otherwise."""
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 4, "borderaxespad": 0.1}
    ax.legend(**place | {"frameon": False, "fontsize": 8.5, "labelcolor": INK, "handlelength": 1.3} | options)


def as_svg(figure: Figure, description: str) -> str:
    """An ``<svg>`` element as wide as its place; ``description`` is for those who cannot see it."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dynaspec"}), warnings.catch_warnings():
        # Names in any script: it is the reader's fonts that count, not those that the figure is measured with.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None, "Type": None, "Format": None})  # type: ignore[no-untyped-call]
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"(font: [^;\"]*?[\d.]+px) [^;\"]*", r"\1 var(--sans)", text)
    text = text.replace(INK, "var(--ink)").replace(FAINT, "var(--rule)")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(description, quote=True)}"', 1)
