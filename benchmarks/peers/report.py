"""The comparison as tables and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynaspec.pictures import INK, SERIES, new_figure, save_png, tidy
from peers.results import Results

DOUBTED = 0.5
"""Share of answers that start as the reference's, below which a side's answers are marked."""


def full_table(results: Results) -> Table:
    """Every side: prefill, decoding and total in tokens/s at each load, and whether its answers agree."""
    table = Table(box=SIMPLE_HEAD, title="tokens/s, medians: prefill / decoding / total", title_justify="left")
    table.add_column("engine")
    table.add_column("variant")
    for load in results.loads:
        table.add_column(f"{load} at once", justify="right", no_wrap=True)
    table.add_column("same / same start", justify="right")
    for side in results.order:
        cells = [_cell(results, side, load) for load in results.loads]
        table.add_row(*side, *cells, _agreement(results, side))
    return table


def best_table(results: Results, ours: str) -> Table:
    """Each peer's fastest variant by load, prefill included, and how many times as fast ours is."""
    table = Table(
        box=SIMPLE_HEAD,
        title=f"each at its best: total tokens/s, and {ours}'s speed over it",
        title_justify="left",
    )
    table.add_column("engine")
    for load in results.loads:
        table.add_column(f"{load} at once", justify="right")
    for peer in results.peers():
        table.add_row(peer, *(_best_cell(results, peer, ours, load) for load in results.loads))
    return table


def failures(results: Results) -> list[str]:
    """A line for everything that could not be measured."""
    return [
        f"{side[0]}, {side[1]}{'' if load is None else f', {load} at once'}: {reason}"
        for side in results.order
        for load, reason in results.failures.get(side, {}).items()
    ]


def picture(results: Results, path: Path, title: str) -> None:
    """Bars of each peer's best variant by load: everything, and decoding alone.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(max(7.5, 4.4 * len(results.loads)), 7.0, title)
    axes = figure.subplots(2, len(results.loads), squeeze=False)
    peers = results.peers()
    for row, (what, label) in enumerate((("total", "prefill included"), ("decoding", "decoding alone"))):
        for ax, load in zip(axes[row], results.loads, strict=True):
            bests = [results.best(peer, load) for peer in peers]
            rates = [(results.figure(side, load, what) or 0.0) if side else 0.0 for side in bests]
            bars = ax.bar(range(len(peers)), rates, 0.72, color=SERIES[: len(peers)], zorder=2)
            ax.bar_label(bars, [f"{rate:.0f}" if rate else "–" for rate in rates], fontsize=8, padding=2, color=INK)
            tidy(ax, f"{load} at once, {label}", "", "tokens/s")
            names = [_wrapped(peer, side[1] if side else "failed") for peer, side in zip(peers, bests, strict=True)]
            ax.set_xticks(range(len(peers)), names, fontsize=6.5)
            ax.margins(y=0.14)
    save_png(figure, path)


def _cell(results: Results, side: tuple[str, str], load: int) -> str:
    if results.failure(side, load) is not None:
        return "failed"
    figures = [results.figure(side, load, what) for what in ("prefill", "decoding", "total")]
    return " / ".join("-" if figure is None else f"{figure:.0f}" for figure in figures)


def _best_cell(results: Results, peer: str, ours: str, load: int) -> str:
    side, own = results.best(peer, load), results.best(ours, load)
    if side is None:
        return "failed"
    rate = results.figure(side, load, "total") or 0.0
    ratio = "" if own is None or peer == ours else f", {(results.figure(own, load, 'total') or 0.0) / rate:.2f}×"
    return f"{rate:.0f} ({side[1]}){ratio}"


def _agreement(results: Results, side: tuple[str, str]) -> str:
    found = results.agreement.get(side)
    if found is None:
        return "-"
    mark = " ?" if found.same_start < DOUBTED * found.prompts else ""
    return f"{found.same} / {found.same_start} of {found.prompts}{mark}"


def _wrapped(peer: str, variant: str) -> str:
    words: Sequence[str] = variant.split(", ")
    return "\n".join((peer.replace(" ", "\n"), *words))
