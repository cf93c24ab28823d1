"""A comparison as a table."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .compare import Comparison, Line

MARGIN = 0.01
"""Ratios within this of 1 are called neither better nor worse."""
_STYLES = {1: ("green", "better"), -1: ("red", "worse"), 0: ("", "")}


def as_table(comparison: Comparison) -> Table:
    """A figure a line; each result's value, and for all but the first its ratio to the first."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("figure", no_wrap=True)
    for i, name in enumerate(comparison.names):
        table.add_column(Text(name), justify="right", overflow="fold")
        if i:
            table.add_column("/ first", justify="right", no_wrap=True)
            table.add_column("", no_wrap=True)
    for line in comparison.lines:
        table.add_row(line.name, *_cells(line))
    return table


def warnings(comparison: Comparison) -> list[str]:
    """A sentence for every setting in which the results differ, and for those who do not say theirs."""
    differing = [f"{name} differs: {', '.join(said)}" for name, said in comparison.differing.items()]
    return differing + [f"{name} does not say all of its settings" for name in comparison.silent]


def _cells(line: Line) -> list[Text]:
    cells = [Text(_number(line.values[0]))]
    for i in range(1, len(line.values)):
        style, word = _STYLES[line.verdict(i, MARGIN)]
        ratio = line.ratio(i)
        shown = "-" if ratio is None else f"{ratio:.3f}"
        cells += [Text(_number(line.values[i])), Text(shown, style=style), Text(word, style=style)]
    return cells


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"
