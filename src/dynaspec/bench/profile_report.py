"""A profile as a table and as a picture."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dynaspec.control.profile import Profile

from .style import INK, SERIES, new_figure, save_png, tidy


def as_table(profile: Profile, title: str) -> Table:
    """One batch size a line: milliseconds by draft length, and the length of the largest goodput."""
    lengths = list(next(iter(profile.batch_stats.values())))
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("batch", justify="right")
    for k in lengths:
        table.add_column(f"k = {k}", justify="right", no_wrap=True)
    table.add_column("best k", justify="right")
    for batch, row in profile.batch_stats.items():
        best = best_length(profile, batch)
        cells = [Text(f"{row[k]:.2f}", style="bold green" if k == best else "") for k in lengths]
        table.add_row(str(batch), *cells, str(best))
    return table


def acceptance_line(profile: Profile) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in profile.acceptance_rate_per_pos)
    return f"acceptance by position: {rates}; length of full drafts: {1 + sum(profile.acceptance_rate_per_pos):.2f}"


def best_length(profile: Profile, batch: int) -> int:
    """What the ``goodput`` policy would draft."""
    return profile.best_length(batch, profile.acceptance_rate_per_pos, profile.max_num_speculative_tokens)


def goodput(profile: Profile, batch: int, k: int) -> float:
    """Expected tokens per second of one request."""
    lengths = tuple(accumulate(profile.acceptance_rate_per_pos, initial=1.0))
    return 1e3 * lengths[k] / profile.itl_ms(batch, k)


def plot_profile(profile: Profile, path: Path, title: str) -> None:
    """Writes a PNG: step time over batch size by draft length; goodput over draft length by batch size, as speed-up.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(11, 4.4, title)
    left, right = figure.subplots(1, 2)
    _step_times(left, profile)
    _speedups(right, profile)
    save_png(figure, path)


def _step_times(ax: Axes, profile: Profile) -> None:
    batches = list(profile.batch_stats)
    for k, colour in zip(next(iter(profile.batch_stats.values())), SERIES * 10, strict=False):
        times = [profile.batch_stats[batch][k] for batch in batches]
        ax.plot(batches, times, "o-", color=colour, linewidth=1.6, markersize=4, label=f"k = {k}")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.legend(frameon=False, fontsize=8.5)
    tidy(ax, "Inter-token latency of a step", "requests that decode", "ms")


def _speedups(ax: Axes, profile: Profile) -> None:
    lengths = list(range(profile.max_num_speculative_tokens + 1))
    for batch, colour in zip(profile.batch_stats, SERIES * 10, strict=False):
        curve = [goodput(profile, batch, k) / goodput(profile, batch, 0) for k in lengths]
        best = best_length(profile, batch)
        ax.plot(lengths, curve, color=colour, linewidth=1.6, label=f"batch {batch}")
        ax.plot(best, curve[best], "o", color=colour, markersize=6)
    ax.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    ax.set_xticks(lengths)
    ax.legend(frameon=False, fontsize=8.5)
    tidy(ax, "Goodput over that of plain decoding", "draft length k (dot: the best)", "times")
