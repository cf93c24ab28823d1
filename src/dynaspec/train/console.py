"""Progress for people: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dynaspec.train.report import Listener, Report

PLAIN_SECONDS = 15.0


@contextmanager
def progress(title: str, console: Console | None = None) -> Iterator[Listener]:
    """A listener that shows how the stage called ``title`` goes, for as long as the context lasts."""
    console = console or Console(file=sys.stdout)
    if not console.is_terminal:
        yield _plain(title, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, console=console, refresh_per_second=2) as bar:
        task = bar.add_task(title, total=1.0, figures="")

        def listen(report: Report) -> None:
            bar.update(task, completed=min(1.0, report.share), figures=report.figures)

        yield listen


def _plain(title: str, console: Console) -> Listener:
    last = -PLAIN_SECONDS

    def listen(report: Report) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            console.print(f"{title} {report.share:.1%} {report.figures}", soft_wrap=True, highlight=False)

    return listen
