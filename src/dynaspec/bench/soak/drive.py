"""So many callers at once, one call after the other; every answer is checked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .calls import Blunder, Call
from .client import Result
from .wishes import Answer

_KEPT = 20
"""Descriptions of what went wrong."""


@dataclass(slots=True)
class Tally:
    """What became of all calls."""

    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    """That were received."""
    wrong: int = 0
    """Answers, or beginnings of answers, that are not those of a single run."""
    problems: list[str] = field(default_factory=list)
    """The first of what is wrong or broken."""

    @property
    def calls(self) -> int:
        return sum(self.ends.values())

    @property
    def failed(self) -> int:
        return self.wrong + self.ends["broken"]

    def add(self, call: Call, result: Result, known: Sequence[Answer]) -> None:
        """Checks a result and counts it."""
        self.ends[result.end] += 1
        if result.end == "broken":
            self._note(f"{call}: {result.why}")
        elif not isinstance(call, Blunder):
            self.tokens += sum(len(choice.token_ids) for choice in result.choices)
            if not _right(result, known[call.wish]):
                self.wrong += 1
                self._note(f"{call}: got {result.choices}, expected {known[call.wish]}")

    def _note(self, problem: str) -> None:
        if len(self.problems) < _KEPT:
            self.problems.append(problem)


def _right(result: Result, known: Answer) -> bool:
    if result.end == "answered":
        return result.choices == list(known)
    return all(found.begins(whole) for found, whole in zip(result.choices, known, strict=True))


class MakesCalls(Protocol):
    """``client.Caller``."""

    async def call(self, call: Call) -> Result: ...


async def drive(
    caller: MakesCalls, calls: Iterator[Call], known: Sequence[Answer], concurrency: int, go_on: Callable[[], bool]
) -> Tally:
    """Makes calls until there are no more, or no more are wanted.

    Args:
        known: the answer to each wish.
        go_on: asked before every call.
    """
    tally = Tally()

    async def work() -> None:
        while go_on() and (call := next(calls, None)) is not None:
            tally.add(call, await caller.call(call), known)

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work())
    return tally
