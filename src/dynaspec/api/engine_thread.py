"""The thread in which an engine steps, and the only one that touches it.

Other threads hand it commands, which it carries out between two steps. It ends once, because it is closed or because
something failed, and then answers everyone: open streams, commands that were still waiting, those who wait for the end.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import TypeVar

from dynaspec.contract.errors import DynaspecError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.engine.engine import Engine
from dynaspec.engine.intake import Prompt

from .stream import Alarm, Stream, wake

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
