"""Comparisons as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

import dynaspec
from dynaspec.contract.errors import ConfigError
from dynaspec.control.policies.short_names import PLAIN

from .comparison import PolicyResult
from .policies import ORACLES

SCHEMA = 1
"""Of the JSON file; grows when a key changes its meaning."""
_COLUMNS = ("policy", "tokens/s", "× plain", "ms/token", "p99", "TTFT p99", "k", "length", "wasted", "passes")


def as_table(results: Sequence[PolicyResult], title: str) -> Table:
    """One policy a line.

    Output tokens a second and their ratio to plain decoding; time per output token of the median request and of the
    99th percentile; the same percentile of the time to the first token; tokens drafted for a request in a step, and
    emitted; drafts wasted per token of output; target and drafter passes.
    """
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    plain = next(result.totals for result in results if result.name == PLAIN)
    real = [result.totals.tokens_per_second for result in results if result.name not in ORACLES]
    for result in results:
        totals = result.totals
        style = "dim" if result.name in ORACLES else "bold green" if totals.tokens_per_second == max(real) else ""
        per_token = 1e3 * totals.per_token_s()
        table.add_row(
            Text(result.name, style=style),
            Text(f"{totals.tokens_per_second:.0f}", style=style),
            Text(f"{totals.tokens_per_second / plain.tokens_per_second:.2f}", style=style),
            _percentile(per_token, 50, ".2f"),
            _percentile(per_token, 99, ".2f"),
            _percentile(totals.first_token_s(), 99, ".2f") + " s",
            f"{totals.mean_k:.2f}",
            f"{totals.acceptance_length:.2f}",
            f"{totals.wasted:.2f}",
            f"{totals.target_passes} / {totals.drafter_passes}",
        )
    return table


def document(results: Sequence[PolicyResult], options: Mapping[str, Any], costs: str) -> dict[str, Any]:
    """Everything simulated, as plain JSON values."""
    return {
        "schema": SCHEMA,
        "kind": "simulation",
        "dynaspec": dynaspec.__version__,
        "costs": costs,
        "options": dict(options),
        "policies": {result.name: result.totals.document() for result in results},
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from None


def _percentile(values: np.ndarray[Any, Any], percent: int, form: str) -> str:
    return format(float(np.percentile(values, percent)), form) if len(values) else "-"
