"""What the commands say beside their results: on stderr, so that stdout can be piped and compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text


def stderr_console() -> Console:
    """A console on the current stderr."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """``error: …`` on one line, red on a terminal."""
    stderr_console().print(Text("error: " + " ".join(message.split()), style="red"))


def note(message: str) -> None:
    """A remark that is no error."""
    stderr_console().print(Text(message, style="dim"))


@contextmanager
def status(first: str, *, hidden: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner with a text that the yielded function changes; nothing if hidden or stderr is no terminal."""
    console = stderr_console()
    if hidden or not console.is_terminal:
        yield lambda message: None
        return
    with console.status(Text(first)) as spinner:
        yield lambda message: spinner.update(Text(message))
