"""Progress in stages: a bar each on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

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
