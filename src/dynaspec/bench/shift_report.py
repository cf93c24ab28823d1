"""The shifting workload as a table, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .drive import StepTrace
from .policies import PLAIN
from .provenance import provenance
from .report import SCHEMA
from .shift import WANTED, ShiftResult
from .style import BLUE, GREEN, GREY, INK, new_figure, save_png, tidy

_BINS = 24
"""Points of a curve in each phase."""


def as_table(result: ShiftResult) -> Table:
    """One side a line: tokens per second of every phase and of the whole sequence."""
    table = Table(box=SIMPLE_HEAD, title="Tokens/s, medians over the rounds", title_justify="left")
    table.add_column("side", no_wrap=True)
    for phase in (*result.phases, "all"):
        table.add_column(phase, justify="right", no_wrap=True)
    best = {p: max(result.runs, key=lambda side: median(result.rates(side, p))) for p in (*result.phases, None)}
    for side in result.runs:
        cells = [
            Text(f"{median(result.rates(side, p)):.0f}", style="bold green" if best[p] == side else "")
            for p in (*result.phases, None)
        ]
        table.add_row(Text(side, style="bold" if side in (result.policy, result.best_fixed) else ""), *cells)
    return table


def verdict(result: ShiftResult) -> Text:
    """The two ratios over the whole sequence, and whether the first is what is wanted."""
    found, bound = result.ratio(result.best_fixed)
    plain, plain_bound = result.ratio(PLAIN)
    line = (
        f"{result.policy} over {result.best_fixed}, the best fixed length: {found:.3f} ({_bound(bound)}), expected "
        f"≥ {WANTED}; over plain decoding: {plain:.3f} ({_bound(plain_bound)})"
    )
    if result.different:
        line += f"; {result.different} OUTPUTS DIFFER from plain decoding's"
    return Text(line, style="green" if found >= WANTED and not result.different else "bold red")


def _bound(bound: float | None) -> str:
    return "one round, no bound" if bound is None else f"bound {bound:.3f}"


def as_document(result: ShiftResult, options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but the single steps, with its provenance, as JSON values."""
    ratios = {name: result.ratio(side) for name, side in (("best_fixed", result.best_fixed), ("plain", PLAIN))}
    return {
        "schema": SCHEMA,
        "provenance": provenance(),
        "options": dict(options),
        "best_fixed": result.best_fixed,
        "ratios": {name: {"median": m, "bound": b} for name, (m, b) in ratios.items()},
        "different_outputs": result.different,
        "tokens_per_second_rounds": {
            side: {phase or "all": list(result.rates(side, phase)) for phase in (*result.phases, None)}
            for side in result.runs
        },
    }


def plot_shift(result: ShiftResult, path: Path, title: str) -> None:
    """Writes a PNG: tokens per second and mean draft length over the work done, for three sides in the last round.

    The horizontal axis is the share of a phase's tokens, so that the sides can be compared where they do the same.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(11, 6, title)
    speed, drafts = figure.subplots(2, 1, sharex=True)
    for side, colour, width in ((PLAIN, GREY, 1.4), (result.best_fixed, BLUE, 1.6), (result.policy, GREEN, 2.2)):
        for i, phase in enumerate(result.phases):
            steps = result.runs[side][-1][phase].steps
            places = i + (np.arange(_BINS) + 0.5) / _BINS
            label = side if i == 0 else None
            for ax, curve in ((speed, _rate(steps)), (drafts, _draft(steps))):
                seen = np.isfinite(curve)
                ax.plot(places[seen], curve[seen], color=colour, linewidth=width, label=label)
    speed.set_yscale("log")
    for ax in (speed, drafts):
        _phases(ax, result.phases)
    speed.legend(frameon=False, fontsize=8.5, ncols=3, loc="lower right")
    tidy(speed, "Speed", "", "tokens per second")
    tidy(drafts, "Mean draft length", "phase; within it, share of its tokens", "tokens per request and step")
    save_png(figure, path)


def _phases(ax: Axes, names: Sequence[str]) -> None:
    ax.set_xticks([i + 0.5 for i in range(len(names))], names)
    ax.set_xlim(0, len(names))
    for i in range(1, len(names)):
        ax.axvline(i, color=INK, linewidth=0.7, linestyle=(0, (1, 2)))


def _binned(steps: Sequence[StepTrace], values: Sequence[float]) -> np.ndarray:
    """[bins] sums of a value over the steps, by the share of the tokens emitted when each step ended."""
    emitted = np.cumsum([step.counts.emitted for step in steps], dtype=np.float64)
    share = emitted / max(1.0, float(emitted[-1]))
    place = np.minimum((share * _BINS).astype(np.int64), _BINS - 1)
    sums: np.ndarray = np.bincount(place, weights=np.asarray(values, dtype=np.float64), minlength=_BINS)
    return sums


def _rate(steps: Sequence[StepTrace]) -> np.ndarray:
    return _quotient(steps, [s.counts.emitted for s in steps], [s.seconds for s in steps])


def _draft(steps: Sequence[StepTrace]) -> np.ndarray:
    return _quotient(steps, [s.counts.draft_tokens for s in steps], [s.counts.request_steps for s in steps])


def _quotient(steps: Sequence[StepTrace], above: Sequence[float], below: Sequence[float]) -> np.ndarray:
    """Not a number where a bin has no step."""
    bottom = _binned(steps, below)
    found: np.ndarray = np.divide(_binned(steps, above), bottom, out=np.full(_BINS, np.nan), where=bottom > 0)
    return found
