"""What the benchmark commands print on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_FILE_WIDTH = 120
"""Columns of the tables where there is no terminal to fit them into."""


def result_console() -> Console:
    """A console on stdout, wide enough for the tables where it is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


@contextmanager
def progress(*, hidden: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Progress on stderr, told as (stage, done, in all); or none."""
    from dynaspec.bench.console import stages

    if hidden:
        yield lambda stage, done, total: None
        return
    with stages() as tell:
        yield tell
