"""The demonstration's figures as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .demo import KINDS, MODES, Summary
from .policies import PLAIN

_COLOURS = ("#9aa5b1", "#7aa6d8", "#e3a857", "#2a9d6f")
_INK = "#2f3640"
_PANELS: Sequence[tuple[str, str, Callable[[Summary], float], bool]] = (
    ("Speed", "tokens per second", lambda s: s.tokens_per_second, True),
    ("Speed-up over plain decoding", "×", lambda s: s.speedup, True),
    ("Acceptance length", "tokens per verification step", lambda s: s.acceptance_length, False),
    ("Wasted drafts", "rejected per token of output", lambda s: s.wasted, False),
)
"""Title, unit, quantity, whether plain decoding has one."""


def plot_summaries(summaries: Mapping[str, Mapping[str, Summary]], path: Path, title: str) -> None:
    """Writes a PNG of four panels: bars for every policy, grouped by kind of prompt.

    Args:
        summaries: kind of prompt → policy → summary.
    """
    figure = Figure(figsize=(11, 7.2), dpi=150, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).flatten()
    for ax, (name, unit, quantity, with_plain) in zip(axes, _PANELS, strict=True):
        policies = [policy for policy in MODES if with_plain or policy != PLAIN]
        _bars(ax, summaries, policies, quantity)
        ax.set_title(name, loc="left", fontsize=11.5, fontweight="bold", color=_INK)
        ax.set_ylabel(unit, fontsize=9, color=_INK)
    axes[1].axhline(1.0, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(MODES), frameon=False, fontsize=10)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, color=_INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(path)


def _bars(
    ax: Axes,
    summaries: Mapping[str, Mapping[str, Summary]],
    policies: Sequence[str],
    quantity: Callable[[Summary], float],
) -> None:
    width = 0.8 / len(policies)
    colours = dict(zip(MODES, _COLOURS, strict=True))
    for i, policy in enumerate(policies):
        heights = [quantity(of_kind[policy]) for of_kind in summaries.values()]
        places = [x + (i - (len(policies) - 1) / 2) * width for x in range(len(summaries))]
        bars = ax.bar(places, heights, 0.9 * width, color=colours[policy], label=MODES[policy], zorder=2)
        ax.bar_label(bars, [_label(height) for height in heights], fontsize=8, padding=2, color=_INK)
    ax.set_xticks(range(len(summaries)), [KINDS[kind] for kind in summaries], fontsize=10, color=_INK)
    ax.tick_params(axis="y", labelsize=8.5, colors=_INK, length=0)
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="y", color="#e6e9ed", linewidth=0.8, zorder=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#b8c0ca")
    ax.margins(y=0.14)


def _label(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.2f}"
