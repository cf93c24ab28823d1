"""A sweep as a table, as JSON and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynaspec.bench.markdown import as_markdown
from dynaspec.bench.provenance import provenance

from .document import SCHEMA, figures
from .remarks import remarks
from .sweep import Cell, Point
from .sweep_summary import Row, summarise, tail_of

KIND = "sweep"
_COLUMNS = (
    "medians over the rounds, times in milliseconds; tokens/s: output tokens of all requests; / first: over those of "
    "the first side in the same round; TTFT, TPOT, E2E: of the median request; good/s: requests a second within the "
    "goodput's limits; length: tokens per step with a draft"
)


def as_document(cells: Sequence[Cell], options: Mapping[str, Any]) -> dict[str, Any]:
    """All cells with their figures, and their medians."""
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "provenance": provenance(),
        "options": dict(options),
        "summary": [asdict(row) | {"point": _point(row.point)} for row in summarise(cells)],
        "cells": [
            {"side": cell.side, "round": cell.round, "num_prompts": len(cell.finished.fitted.requests)}
            | _point(cell.point)
            | figures(cell.finished)
            | {"remarks": remarks(cell.finished)}
            for cell in cells
        ],
    }


def as_text(cells: Sequence[Cell]) -> str:
    """The medians as a Markdown table, and below it what must be known of them."""
    said = "".join(f"\n* {remark}" for remark in (_COLUMNS, *all_remarks(cells)))
    return f"{as_markdown(_shown(cells))}{said}\n"


def as_table(cells: Sequence[Cell]) -> Table:
    """The medians for a terminal."""
    table = Table(box=SIMPLE_HEAD, title="Medians over the rounds; times in ms", title_justify="left")
    rows, summaries = _shown(cells), summarise(cells)
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "side" else "right", no_wrap=True)
    for i, row in enumerate(rows):
        last_of_load = i + 1 == len(rows) or summaries[i + 1].point != summaries[i].point
        table.add_row(*("-" if value is None else value for value in row.values()), end_section=last_of_load)
    return table


def all_remarks(cells: Sequence[Cell]) -> list[str]:
    """Every remark once, with where it was first made."""
    found: dict[str, Cell] = {}
    for cell in cells:
        for remark in remarks(cell.finished):
            found.setdefault(remark, cell)
    return [f"{cell.side} at {cell.point.label}: {remark}" for remark, cell in found.items()]


def _shown(cells: Sequence[Cell]) -> list[dict[str, str | None]]:
    """Rows of column → text, times in milliseconds. Columns in which nothing was measured are left out."""
    rows = [_texts(row, tail_of(cells)) for row in summarise(cells)]
    kept = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    return [{name: row[name] for name in kept} for row in rows]


def _texts(row: Row, tail: float) -> dict[str, str | None]:
    return {
        "load": row.point.label,
        "side": row.side,
        "tokens/s": _number(row.output_tokens_per_s, 1),
        "/ first": _number(row.over_first, 3),
        "TTFT": _number(row.ttft_ms, 1),
        "TPOT": _number(row.tpot_ms, 2),
        "E2E": _number(row.e2el_ms, 0),
        f"p{tail:g} E2E": _number(row.tail_e2el_ms, 0),
        "good/s": _number(row.goodput, 2),
        "length": _number(row.acceptance_length, 2),
        "accepted": None if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
        "failed": str(row.failed) if row.failed else None,
    }


def _point(point: Point) -> dict[str, Any]:
    rate = "inf" if math.isinf(point.request_rate) else point.request_rate
    return {"max_concurrency": point.max_concurrency, "request_rate": rate}


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
