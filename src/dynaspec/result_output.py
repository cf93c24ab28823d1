"""How commands and studies show how far they are, and show and write their results: tables, folders, text, JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dynaspec.contract.errors import ConfigError

Tell = Callable[[str, int, int], None]
"""Told (stage, units done, units in all)."""
_LINE_SECONDS = 15.0


@contextmanager
def stages(console: Console | None = None) -> Iterator[Tell]:
    """Shows, on stderr, how far each stage is."""
    console = console or Console(file=sys.stderr, highlight=False)
    if not console.is_terminal:
        yield _lines(console)
        return
    # Only terminals need it, and it takes a while to import.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield tell


def _lines(console: Console) -> Tell:
    last: dict[str, float] = {}

    def tell(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage not in last or done == total or now - last[stage] >= _LINE_SECONDS:
            last[stage] = now
            console.print(f"{stage}: {done} of {total}", soft_wrap=True)

    return tell


def new_table(title: str, columns: Iterable[str], left: Collection[str] = (), *, dense: bool = False) -> Table:
    """A table without rows.

    Args:
        left: columns of text; the others have numbers, which stand at the right.
        dense: as little space between columns as can be.
    """
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=not dense, collapse_padding=dense)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first row's keys are the columns; None is a dash."""
    columns = list(rows[0])
    lines = [_line(columns), _line(["---:"] * len(columns))]
    lines += [_line(["-" if row[name] is None else str(row[name]) for name in columns]) for row in rows]
    return "".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def make_folder(path: Path) -> None:
    """Creates the folder that results will go to: before the work that makes them.

    Raises:
        ConfigError: it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {path} cannot be created: {error.strerror}") from None


def json_text(document: Mapping[str, Any]) -> str:
    """Indented, in UTF-8; a path is written as its text."""
    return json.dumps(document, indent=2, ensure_ascii=False, default=os.fspath)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json_text(document) + "\n")


def write_text(path: Path, text: str) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
