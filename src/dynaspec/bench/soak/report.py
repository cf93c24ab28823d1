"""A soak as a table, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynaspec.bench.style import BLUE, GOLD, GREY, RED, new_figure, save_png, tidy

from .drive import Tally
from .watch import Load, Sample, growth_mb_per_min

WARM_UP_S = 120.0
"""Until then memory may grow: caches fill and code is compiled."""
MOST_MB_PER_MIN = 1.0
_LEAST_MB = 10.0
"""Shown above and below, so that a memory that stays does not look as if it moved."""


@dataclass(frozen=True, slots=True)
class Soak:
    """What a soak found."""

    seconds: float
    tally: Tally
    samples: Sequence[Sample]
    load_after: Load
    """When everyone had gone."""
    exit_code: int
    """Of the server, when it was asked to stop."""

    @property
    def growth_mb_per_min(self) -> float | None:
        """After the warm-up; None if the soak was too short to say."""
        return growth_mb_per_min(self.samples, WARM_UP_S)

    def verdicts(self) -> list[tuple[str, str, bool]]:
        """(what was checked, what was found, whether that is right)."""
        tally, growth = self.tally, self.growth_mb_per_min
        load = self.load_after
        checks = [
            ("calls answered as they should be", f"{tally.calls - tally.failed} of {tally.calls}", tally.failed == 0),
            (
                "left when everyone has gone",
                f"{load.running} running, {load.waiting} waiting, {100 * load.kv_usage:g} % of KV blocks",
                load.idle,
            ),
            ("server's exit code", str(self.exit_code), self.exit_code == 0),
        ]
        if growth is not None:
            checks.append(("memory after two minutes", f"{growth:+.2f} MB a minute", growth < MOST_MB_PER_MIN))
        return checks

    def as_json(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "seconds": self.seconds,
            "calls": tally.calls,
            "ends": dict(tally.ends),
            "tokens": tally.tokens,
            "wrong": tally.wrong,
            "problems": tally.problems,
            "load_after": asdict(self.load_after),
            "exit_code": self.exit_code,
            "growth_mb_per_min": self.growth_mb_per_min,
            "passed": all(good for _, _, good in self.verdicts()),
            "samples": [asdict(sample) for sample in self.samples],
        }


def as_table(soak: Soak) -> Table:
    """What was done, and the verdicts."""
    tally = soak.tally
    table = Table(box=SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_row("calls", f"{tally.calls} in {soak.seconds:.0f} s, {tally.calls / soak.seconds:.1f} a second", "")
    table.add_row("how they ended", ", ".join(f"{count} {end}" for end, count in tally.ends.most_common()), "")
    table.add_row("tokens received", f"{tally.tokens}, {tally.tokens / soak.seconds:.0f} a second", "")
    if soak.samples:
        memory = [sample.memory_mb for sample in soak.samples]
        table.add_row("memory", f"{memory[0]:.0f} MB at first, {max(memory):.0f} at most, {memory[-1]:.0f} at last", "")
    for what, found, good in soak.verdicts():
        table.add_row(what, found, "[green]good[/]" if good else "[bold red]BAD[/]")
    return table


def plot(soak: Soak, path: Path, title: str) -> None:
    """Writes a PNG: memory and load over time.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(10, 6.4, title)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    minutes = np.array([sample.at_s / 60 for sample in soak.samples])
    memory = np.array([sample.memory_mb for sample in soak.samples])
    upper.plot(minutes, memory, color=BLUE, linewidth=1.6)
    upper.set_ylim(memory.min() - _LEAST_MB, memory.max() + _LEAST_MB)
    growth, warm = soak.growth_mb_per_min, minutes >= WARM_UP_S / 60
    if growth is not None:
        fitted = memory[warm].mean() + growth * (minutes[warm] - minutes[warm].mean())
        label = f"{growth:+.2f} MB a minute"
        upper.plot(minutes[warm], fitted, color=RED, linewidth=1.2, linestyle="--", label=label)
        upper.legend(frameon=False, fontsize=9, loc="lower right")
    tidy(upper, "Memory of the server's process", "", "MB")
    lower.plot(minutes, [s.load.running for s in soak.samples], color=BLUE, linewidth=1.2, label="running")
    lower.plot(minutes, [s.load.waiting for s in soak.samples], color=GOLD, linewidth=1.2, label="waiting")
    usage = lower.twinx()
    usage.plot(minutes, [100 * s.load.kv_usage for s in soak.samples], color=GREY, linewidth=0.8)
    usage.set_ylim(0, 105)
    lower.set_ylim(bottom=0)
    tidy(lower, "Requests, and KV blocks in use (grey)", "minutes", "requests")
    tidy(usage, "", "", "% of KV blocks")
    usage.grid(visible=False)
    lower.legend(frameon=False, fontsize=9, loc="upper right", ncols=2)
    save_png(figure, path)
