"""What measurements write on a terminal: progress in stages, decoded text, Markdown tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from dynaspec.contract.outputs import RequestOutput
from dynaspec.engine.tokenizer import Tokenizer

Tell = Callable[[str, int, int], None]
"""Told (stage, units done, units in all)."""
_LINE_SECONDS = 15.0
DRAFTED = "green"
"""Style of text that was drafted and accepted; the target's own tokens are plain."""
_PROMPT_LINES = 4


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


class StreamView:
    """Shows one prompt's continuation while it grows.

    Args:
        prompt: what is shown before it; of a long one, the end.
    """

    def __init__(self, console: Console, tokenizer: Tokenizer, prompt: str = "") -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._tokens = 0
        self._accepted = 0
        self._shown = 0
        self._print(_tail(prompt), "dim")

    def update(self, output: RequestOutput) -> None:
        """Adds what a step has brought: accepted drafts first, then the target's own token."""
        completion = output.outputs[0]
        accepted = completion.metrics.accepted - self._accepted
        drafted_until = len(self._tokenizer.decode(completion.token_ids[: self._tokens + accepted]))
        boundary = max(self._shown, min(drafted_until, len(completion.text))) if accepted else self._shown
        self._print(completion.text[self._shown : boundary], DRAFTED)
        self._print(completion.text[boundary:], "")
        self._tokens, self._accepted = len(completion.token_ids), completion.metrics.accepted
        self._shown = len(completion.text)
        if output.finished:
            self._console.print()

    def _print(self, text: str, style: str) -> None:
        if text:
            self._console.print(Text(text, style=style, end=""), end="", soft_wrap=True)


def _tail(prompt: str) -> str:
    """The prompt's last lines, a long one shortened."""
    lines = prompt.splitlines(keepends=True)
    return "…\n" * (len(lines) > _PROMPT_LINES) + "".join(lines[-_PROMPT_LINES:])


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first row's keys are the columns; None is a dash."""
    columns = list(rows[0])
    lines = [_line(columns), _line(["---:"] * len(columns))]
    lines += [_line(["-" if row[name] is None else str(row[name]) for name in columns]) for row in rows]
    return "".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"
