"""Rows as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first row's keys are the columns; None is a dash."""
    columns = list(rows[0])
    lines = [_line(columns), _line(["---:"] * len(columns))]
    lines += [_line(["-" if row[name] is None else str(row[name]) for name in columns]) for row in rows]
    return "".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"
