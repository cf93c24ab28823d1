"""Comparisons as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dynaspec.contract.errors import ConfigError
from dynaspec.observe.counts import SpecCounts

from .offline import PolicyResult

SCHEMA = 1
"""Of the JSON file; grows when a key changes its meaning."""
_SHOWN_POSITIONS = 6
_COLUMNS = ("policy", "tokens/s", "speed-up", "length", "accepted", "per position", "passes", "time", "identical")


def as_table(results: Sequence[PolicyResult], title: str) -> Table:
    """One policy a line.

    The acceptance length, the share of drafts accepted, in all and per position; then the passes and times of one
    round, the target's before the drafter's.
    """
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("policy", "per position") else "right", no_wrap=True)
    fastest = max(result.tokens_per_second for result in results)
    for result in results:
        counts = result.counts
        style = "bold green" if result.tokens_per_second == fastest else ""
        table.add_row(
            Text(result.name, style=style),
            Text(f"{result.tokens_per_second:.1f}", style=style),
            Text(f"{result.speedup:.2f}×", style=style),
            number_text(counts.mean_acceptance_length),
            percent_text(counts.draft_acceptance_rate),
            rates_text(counts.rate_per_position),
            f"{counts.target_passes} / {counts.drafter_passes}",
            _seconds(counts),
            identical_text(result),
        )
    return table


def identical_text(result: PolicyResult) -> Text:
    """Whether every output was plain decoding's."""
    return Text("yes", style="green") if result.identical else Text(f"NO ({result.different})", style="bold red")


def number_text(value: float | None) -> str:
    """Two decimals; a dash for None."""
    return "-" if value is None else f"{value:.2f}"


def percent_text(share: float | None) -> str:
    """A share in per cent; a dash for None."""
    return "-" if share is None else f"{100 * share:.0f} %"


def rates_text(rates: Sequence[float]) -> str:
    """Acceptance rates, position by position."""
    shown = " ".join(f"{rate:.2f}".removeprefix("0") for rate in rates[:_SHOWN_POSITIONS])
    return (shown + " …" if len(rates) > _SHOWN_POSITIONS else shown) or "-"


def make_folder(path: Path) -> None:
    """Creates the folder that results will go to: before the work that makes them.

    Raises:
        ConfigError: it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {path} cannot be created: {error.strerror}") from None


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the results cannot be written: {error}") from None


def _seconds(counts: SpecCounts) -> str:
    """Hosts that cannot tell drafting from verifying know whole steps; plain decoding on a host, nothing."""
    if counts.verify_s or counts.draft_s:
        return f"{counts.verify_s:.2f} / {counts.draft_s:.2f} s"
    return f"{counts.step_s:.2f} s" if counts.step_s else "-"
