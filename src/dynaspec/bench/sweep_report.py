"""The load sweep as a table, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .policies import PLAIN
from .provenance import provenance
from .report import SCHEMA
from .style import BLUE, GREEN, GREY, INK, RED, new_figure, save_png, tidy
from .sweep import LoadResult, Ratio


def as_table(results: Sequence[LoadResult]) -> Table:
    """One load a line: speeds, the best rival, both ratios with their bounds, and whether they hold."""
    policy = results[0].policy
    table = Table(box=SIMPLE_HEAD, title=f"{policy} under load, tokens/s", title_justify="left")
    for name in ("at once", "plain", policy, "mean k", "best rival", "its tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"{policy} / best (bound)", justify="right", no_wrap=True)
    table.add_column(f"{policy} / plain (bound)", justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            str(result.load),
            f"{median(result.rates[PLAIN]):.0f}",
            f"{median(result.rates[policy]):.0f}",
            f"{median(result.mean_draft):.2f}",
            result.best,
            f"{median(result.rates[result.best]):.0f}",
            _cell(result.against_best),
            _cell(result.against_plain),
        )
    return table


def verdict(results: Sequence[LoadResult]) -> Text:
    """Whether every ratio reaches what it should, at every load."""
    missed = [
        f"{name} at {result.load}"
        for result in results
        for name, ratio in (("best", result.against_best), ("plain", result.against_plain))
        if not ratio.holds
    ]
    bars = "against the best ≥ 0.97 (bound ≥ 0.94), against plain ≥ 0.99 (bound ≥ 0.97)"
    if missed:
        return Text(f"MISSED {', '.join(missed)}: expected {bars}", style="bold red")
    return Text(f"✓ reached at every load: {bars}", style="green")


def as_document(results: Sequence[LoadResult], options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, with its provenance, as JSON values."""
    return {
        "schema": SCHEMA,
        "provenance": provenance(),
        "options": dict(options),
        "loads": {
            str(result.load): {
                "tokens_per_second_rounds": {side: list(rates) for side, rates in result.rates.items()},
                "mean_draft_rounds": list(result.mean_draft),
                "best_on_odd_rounds": result.best,
                "against_best": _ratio(result.against_best),
                "against_plain": _ratio(result.against_plain),
            }
            for result in results
        },
    }


def plot_sweep(results: Sequence[LoadResult], path: Path, title: str) -> None:
    """Writes a PNG: speed-up over plain decoding by load, for every side; and the two ratios with their bounds.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(11, 4.6, title)
    left, right = figure.subplots(1, 2)
    _speedups(left, results)
    _ratios(right, results)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks([r.load for r in results], [str(r.load) for r in results])
        ax.minorticks_off()
    save_png(figure, path)


def _speedups(ax: Axes, results: Sequence[LoadResult]) -> None:
    loads = [result.load for result in results]
    policy = results[0].policy
    for side in results[0].rates:
        # Sides that sat out are compared on the rounds they took part in, which are the first.
        speedups = [median(a / b for a, b in zip(r.rates[side], r.rates[PLAIN], strict=False)) for r in results]
        if side == policy:
            ax.plot(loads, speedups, "o-", color=GREEN, linewidth=2.4, markersize=5, label=policy, zorder=4)
        elif side == PLAIN:
            ax.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), label=PLAIN, zorder=3)
        else:
            k = int(side.partition(":")[2])
            ax.plot(loads, speedups, color=BLUE, alpha=0.2 + 0.08 * k, linewidth=1.2)
            ax.annotate(
                f"{k}", (loads[-1], speedups[-1]), fontsize=7, color=BLUE, xytext=(3, -2), textcoords="offset points"
            )
    ax.plot([], [], color=BLUE, linewidth=1.2, label="fixed length k")
    ax.legend(frameon=False, fontsize=8.5)
    tidy(ax, "Tokens per second over plain decoding's", "requests at once", "times")


def _ratios(ax: Axes, results: Sequence[LoadResult]) -> None:
    policy = results[0].policy
    for colour, name, found in (
        (GREEN, f"{policy} / best of plain and fixed", [r.against_best for r in results]),
        (GREY, f"{policy} / plain", [r.against_plain for r in results]),
    ):
        loads = [r.load * (0.97 if colour == GREEN else 1.03) for r in results]
        medians = [ratio.median for ratio in found]
        ax.plot(loads, medians, "o", color=colour, markersize=6, label=name)
        ax.vlines(loads, [ratio.bound for ratio in found], medians, color=colour, linewidth=2)
    ax.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    ax.axhline(0.97, color=RED, linewidth=0.8, linestyle=(0, (1, 2)), label="0.97")
    ax.legend(frameon=False, fontsize=8.5)
    tidy(ax, "Medians, and 95 % lower bounds", "requests at once", "ratio")


def _cell(ratio: Ratio) -> Text:
    mark = "✓" if ratio.holds else "✗"
    return Text(f"{ratio.median:.3f} ({ratio.bound:.3f}) {mark}", style="green" if ratio.holds else "red")


def _ratio(ratio: Ratio) -> dict[str, Any]:
    return {"median": ratio.median, "bound": ratio.bound, "holds": ratio.holds, "rounds": list(ratio.rounds)}
