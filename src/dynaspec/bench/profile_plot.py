"""A profile as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from dynaspec.control.profile import Profile

from .profile_report import best_length, goodput
from .style import INK, SERIES, new_figure, save_png, tidy


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
