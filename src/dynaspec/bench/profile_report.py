"""A profile as a table."""

from __future__ import annotations

from itertools import accumulate

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dynaspec.control.profile import Profile


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
