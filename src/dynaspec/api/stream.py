"""The way of one request's outputs from the engine's thread to an event loop.

A stream holds one output at most: what comes before the caller has taken the one before is merged with it, so a caller
that does not read costs no memory. And its reader is woken only where nothing was waiting, a few dozen times a second.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import cast

from dynaspec.contract.outputs import CompletionOutput, RequestOutput


class Stream:
    """The engine's thread calls ``put`` and ``fail``; the rest belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.delta = False
        """Outputs carry only what is new; else each takes the place of the one before."""
        self.ended = False
        """The last output, or the error, has been taken."""
        self.begun = False
        """There has been an output."""
        self._left = False
        self._lock = Lock()
        self._ready = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    @property
    def deserted(self) -> bool:
        """Nobody will ever read what comes."""
        return self._left or self.loop.is_closed()

    def put(self, output: RequestOutput) -> bool:
        """Adds an output; returns whether the reader is to be woken (``Alarm``)."""
        self.begun = True
        with self._lock:
            waiting = self._output
            self._output = output if waiting is None or not self.delta else join(waiting, output)
            return waiting is None

    def fail(self, error: Exception) -> bool:
        """Ends the stream behind what is in it; returns whether the reader is to be woken."""
        with self._lock:
            self._error = error
            return self._output is None

    async def take(self) -> RequestOutput:
        """Waits for the next output.

        Raises:
            Exception: what the stream was ended with.
        """
        await self._ready.wait()
        with self._lock:
            output, self._output = self._output, None
            if self._error is None:
                self._ready.clear()
        self.ended = output is None or output.finished
        if output is None:
            raise cast(Exception, self._error)  # nothing else wakes a reader without an output
        return output

    def leave(self) -> None:
        """Nobody reads any more; the engine gives the request up before its next step."""
        self._left = True


def wake(streams: Iterable[Stream]) -> None:
    """Wakes the streams' readers: one call for each event loop, since every call takes 10 µs and more."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    for loop, members in by_loop.items():
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(_set_ready, members)


def _set_ready(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream._ready.set()


class Alarm:
    """Wakes readers, all at once and not too often.

    Steps take milliseconds, and fifty pieces of text a second look continuous. More of them only keep an event loop
    busy, with which the engine shares Python's lock and often the cores: at 16 streams that cost it 15 % of its speed.
    The first output of a stream and its last do not wait.

    Args:
        interval_s: least time between two outputs of a stream; 0 = one a step.
        clock: seconds.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._rang_s = -math.inf
        self._pending: set[Stream] = set()

    def ring(self, filled: Iterable[Stream], urgent: Iterable[Stream]) -> None:
        """Wakes the urgent readers, and all those who wait if it is time.

        Args:
            filled: have got an output where none was waiting.
            urgent: have got their first or last.
        """
        self._pending.update(filled)
        now = self._clock()
        if now - self._rang_s >= self._interval_s:
            self._rang_s = now
            self.flush()
        else:
            hurried = set(urgent)
            self._pending -= hurried
            wake(hurried)

    def flush(self) -> None:
        """Wakes everybody who waits."""
        wake(self._pending)
        self._pending.clear()


def join(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two deltas as one. What does not grow by deltas (reasons, metrics, sums) is the later one's."""
    pairs = zip(earlier.outputs, later.outputs, strict=True)
    return replace(later, outputs=[_join(first, second) for first, second in pairs])


def _join(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    logprobs = second.logprobs
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    tokens = [*first.token_ids, *second.token_ids]
    return replace(second, text=first.text + second.text, token_ids=tokens, logprobs=logprobs)
