"""The demonstration's figures as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dynaspec.control.policies.short_names import PLAIN

from .demo import Summary, name_of

_COLOURS = ("#9aa5b1", "#e3a857", "#7aa6d8", "#2a9d6f")
"""Of the ways, in their order."""
_INK = "#2f3640"


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    unit: str
    quantity: Callable[[Summary], float]
    label: str = "{:.2f}"
    """Format of the figure over a bar."""
    with_plain: bool = True
    """Whether plain decoding has this quantity."""


_PANELS = (
    _Panel("Speed", "tokens per second", lambda s: s.tokens_per_second, "{:.0f}"),
    _Panel("Speed-up over plain decoding", "times", lambda s: s.speedup),
    _Panel("Acceptance length", "tokens per step with a draft", lambda s: s.acceptance_length or 0.0, with_plain=False),
    _Panel("Wasted drafts", "rejected drafts per token of output", lambda s: s.wasted, with_plain=False),
)


def plot_summaries(summaries: Mapping[str, Mapping[str, Summary]], path: Path, title: str) -> None:
    """Writes a PNG of four panels: bars for every policy, grouped by kind of prompt.

    Args:
        summaries: kind of prompt → policy → summary.
    """
    figure = Figure(figsize=(14, 7.2), dpi=150, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).flatten()
    for ax, panel in zip(axes, _PANELS, strict=True):
        _draw(ax, panel, summaries)
    axes[1].axhline(1.0, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=10)
    figure.suptitle(title + "\n", x=0.012, ha="left", fontsize=13, color=_INK)
    canvas.print_png(path)  # type: ignore[no-untyped-call]


def _draw(ax: Axes, panel: _Panel, summaries: Mapping[str, Mapping[str, Summary]]) -> None:
    ways = list(next(iter(summaries.values())))
    policies = [policy for policy in ways if panel.with_plain or policy != PLAIN]
    width = 0.8 / len(policies)
    colours = dict(zip(ways, _COLOURS, strict=True))
    for i, policy in enumerate(policies):
        heights = [panel.quantity(of_kind[policy]) for of_kind in summaries.values()]
        places = [x + (i - (len(policies) - 1) / 2) * width for x in range(len(summaries))]
        bars = ax.bar(places, heights, 0.9 * width, color=colours[policy], label=name_of(policy), zorder=2)
        ax.bar_label(bars, [panel.label.format(height) for height in heights], fontsize=7, padding=2, color=_INK)
    ax.set_title(panel.title, loc="left", fontsize=11.5, fontweight="bold", color=_INK)
    ax.set_ylabel(panel.unit, fontsize=9, color=_INK)
    ax.set_xticks(range(len(summaries)), list(summaries), fontsize=10, color=_INK)
    ax.tick_params(axis="y", labelsize=8.5, colors=_INK, length=0)
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="y", color="#e6e9ed", linewidth=0.8, zorder=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#b8c0ca")
    ax.margins(y=0.14)
