"""The thread in which an engine steps, and the only one that touches it.

Other threads hand it commands, which it carries out between two steps. It ends once, because it is closed or because
something failed, and then answers everyone: open streams, commands that were still waiting, those who wait for the end.

Outputs reach event loops through streams. A stream holds one output at most: what comes before the caller has taken the
one before is merged with it, so a caller that does not read costs no memory. And its reader is woken only where nothing
was waiting, a few dozen times a second.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from threading import Lock, Thread
from typing import TypeVar, cast

from dynaspec.contract.errors import DynaspecError
from dynaspec.contract.outputs import CompletionOutput, RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.engine.engine import Engine
from dynaspec.engine.intake import Prompt


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


_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_Command = Callable[[BaseException | None], None]
"""Called once, in the engine's thread: with None to act, or with what ended the engine, so that it cannot act."""


class EngineThread:
    """Any thread may call the public methods; those below the line run in the engine's.

    Args:
        stream_interval_s: least time between two outputs of a stream (``Alarm``).
    """

    def __init__(self, engine: Engine, stream_interval_s: float) -> None:
        self._engine = engine
        self._alarm = Alarm(stream_interval_s, time.monotonic)
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        """None: end."""
        self._streams: dict[str, Stream] = {}
        """By request id; those of the engine's unfinished requests."""
        self._gate = Lock()
        self._ended: BaseException | None = None
        """What ended it. Set under the gate, so that no command comes after the last one has been answered."""
        self._wait_for_end: set[Future[DynaspecError]] = set()
        self._thread = Thread(target=self._serve, name="dynaspec-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._ended is None

    def submit(self, request_id: str, prompt: Prompt, params: SamplingParams, stream: Stream) -> None:
        """Starts a request; outputs, or why it is refused, go to the stream.

        Raises:
            DynaspecError: the engine has stopped.
        """

        arrived_s = time.monotonic()

        def add(ended: BaseException | None) -> None:
            if ended is None:
                self._add(request_id, prompt, params, stream, arrived_s)
            elif stream.fail(_stopped(ended)):
                wake([stream])

        self._order(add)

    def abort(self, request_id: str) -> None:
        """Ends a request, if it is running; its stream gets a last output.

        Raises:
            DynaspecError: the engine has stopped.
        """
        self._order(lambda ended: self._abort(request_id) if ended is None else None)

    def abort_all(self) -> None:
        """Ends every request that runs by then; see ``abort``."""

        def end(ended: BaseException | None) -> None:
            for request_id in [] if ended is not None else list(self._streams):
                self._abort(request_id)

        self._order(end)

    def ask(self, question: Callable[[], _T]) -> Future[_T]:
        """Calls ``question`` between two steps; what it raises is the asker's alone.

        Raises:
            DynaspecError: the engine has stopped. The future may say so as well.
        """
        answer: Future[_T] = Future()

        def reply(ended: BaseException | None) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                if ended is not None:
                    raise _stopped(ended)
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._order(reply)
        return answer

    def end(self) -> Future[DynaspecError]:
        """Done, with the reason, when the engine has stopped; to be cancelled by who waits no longer."""
        told: Future[DynaspecError] = Future()
        with self._gate:
            if self._ended is None:
                self._wait_for_end.add(told)
                told.add_done_callback(self._wait_for_end.discard)
                return told
        told.set_result(_stopped(self._ended))
        return told

    def close(self) -> None:
        """Aborts everything and waits for the thread; once closed, it stays so."""
        self._commands.put(None)
        self._thread.join()

    def _order(self, command: _Command) -> None:
        """
        Raises:
            DynaspecError: the engine has stopped.
        """
        with self._gate:
            if self._ended is None:
                self._commands.put(command)
                return
        raise _stopped(self._ended)

    # --- the engine's thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        ended: BaseException = DynaspecError("it was closed")
        try:
            while self._carry_out():
                self._drop_deserted()
                self._hand_out(self._engine.step())
                self._engine.log_stats(time.monotonic())
        except BaseException as error:  # whatever it was, every waiting caller must hear of it
            _log.exception("the engine has stopped")
            ended = error
        finally:
            self._answer_all(ended)
            self._engine.close()

    def _carry_out(self) -> bool:
        """Runs what was ordered; waits if there is nothing else to do. False: end."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.unfinished)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(None)

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams, stream: Stream, arrived_s: float) -> None:
        if stream.deserted:
            return
        before = self._streams.get(request_id)
        if before is not None and before.deserted:  # since the last step: the id is free again
            self._drop(request_id)
        try:
            self._engine.add(request_id, prompt, params, arrived_s=arrived_s)
        except Exception as error:  # what is wrong with one request ends no other
            if not isinstance(error, DynaspecError):
                _log.exception("the request %s could not be started", request_id)
            stream.fail(error)
            wake([stream])
        else:
            stream.delta = params.output_kind is RequestOutputKind.DELTA
            self._streams[request_id] = stream

    def _abort(self, request_id: str) -> None:
        output = self._engine.abort(request_id)
        if output is not None:
            self._hand_out([output])

    def _drop_deserted(self) -> None:
        """Aborts requests whose caller has left, or whose event loop is closed."""
        for request_id in [name for name, stream in self._streams.items() if stream.deserted]:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self._streams[request_id]
        self._engine.abort(request_id)

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        filled, urgent = [], []
        for output in outputs:
            stream = self._streams[output.request_id]
            if output.finished:
                del self._streams[output.request_id]
            if output.finished or not stream.begun:
                urgent.append(stream)
            if stream.put(output):
                filled.append(stream)
        self._alarm.ring(filled, urgent)

    def _answer_all(self, ended: BaseException) -> None:
        """Everyone who waits learns of the end, those whose command is still in the queue too."""
        with self._gate:
            self._ended = ended
            waiting = list(self._wait_for_end)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command(ended)
        self._alarm.flush()
        wake([stream for stream in self._streams.values() if stream.fail(_stopped(ended))])
        self._streams.clear()
        for told in waiting:
            if told.set_running_or_notify_cancel():
                told.set_result(_stopped(ended))


def _stopped(ended: BaseException) -> DynaspecError:
    """One for each caller: an error raised by several would gather the tracebacks of all of them."""
    error = DynaspecError(f"the engine has stopped: {str(ended) or repr(ended)}; expected a running one")
    error.__cause__ = ended
    return error
