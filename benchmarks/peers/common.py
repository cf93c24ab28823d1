"""What the workers share. Only the standard library: it is imported in every peer's environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict


class Workload(TypedDict):
    """Requests, greedy, so many of them at a time: as soon as one has ended, the next one comes."""

    prompts: list[list[int]]
    """Token ids of each."""
    at_once: int
    max_tokens: int
    """Of each answer, which also ends with a token of ``eos``."""
    eos: list[int]


class Setting(TypedDict):
    """What one worker runs, and what it runs it on."""

    options: Mapping[str, Any]
    """Of the variant; each peer has its own."""
    gguf: str
    checkpoint: str
    """Folder of the same weights, in bfloat16, as Transformers reads them."""
    models: str
    """Folder for models that a worker converts and keeps."""
    threads: int
    context: int
    """Most tokens of a request, its answer included."""
    most_at_once: int


class Side(ABC):
    """One engine, ready to decode."""

    versions: Mapping[str, str]
    """Package → version."""

    @abstractmethod
    def decode(self, workload: Workload) -> list[list[int]]:
        """The answers' token ids, in the order of the prompts; an end-of-sequence token may be there or not."""

    def prepare(self, at_once: int) -> None:  # noqa: B027  most engines prepare nothing
        """What takes time once before a workload, off the clock."""

    def rest(self) -> None:  # noqa: B027  nor give anything back
        """Gives back what only a running workload needs."""


class UnsupportedError(Exception):
    """The peer cannot run this workload; the text says why."""


def keep_running(requests: int, at_once: int, add: Callable[[int], object], step: Callable[[], Iterable[int]]) -> None:
    """Starts request after request so that ``at_once`` of them run until none is left.

    Args:
        add: starts a request, by its number.
        step: lets all that run make a step; gives the numbers of those that have ended.
    """
    waiting, running = iter(range(requests)), set[int]()
    while True:
        while len(running) < at_once and (number := next(waiting, None)) is not None:
            add(number)
            running.add(number)
        if not running:
            return
        running.difference_update(step())


def ended(tokens: Sequence[int], workload: Workload) -> bool:
    """Whether an answer is complete."""
    return len(tokens) >= workload["max_tokens"] or bool(tokens and tokens[-1] in workload["eos"])
