"""Connections that may not dawdle, and the end of a server.

What runs may finish, what does not finish is ended, and a dead engine ends everything."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from contextlib import suppress
from socket import socket
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dynaspec.contract.errors import DynaspecError

from .errors import bad_request
from .middleware import as_response
from .state import ServerState


class BoundedConnection(H11Protocol):
    """Closes when a client does not send what it has begun, or does not take what it is sent.

    The former is the headers of a request, from the connection's or their own first byte on; and the rest of a body
    whose request has been answered already. Other bodies are ``BoundedBody``'s, idle connections uvicorn's business.
    The latter is an answer that fills all buffers between here and there: its request is given up.

    Args:
        timeout_s: seconds that a client has.
        uvicorn: what uvicorn makes its connections with.
    """

    def __init__(self, *, timeout_s: float, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._timeout_s = timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        # A client that does not read gets nothing more, so what waits in the buffer is dropped with the connection.
        self._unread = self.loop.call_later(self._timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an error object too."""
        body = as_response(bad_request(f"the request is no HTTP/1.1 ({msg}); expected HTTP/1.1")).body
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._taken()
        super().connection_lost(exc)

    def _look(self) -> None:
        headers_owed = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not (headers_owed or self._body_owed()):
            self._stop()
        elif self._deadline is None:
            self._start()

    def _body_owed(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY

    def _start(self) -> None:
        self._deadline = self.loop.call_later(self._timeout_s, self._close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _taken(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _close(self) -> None:
        self._deadline = None
        self.transport.close()


logger = logging.getLogger(__name__)

_POLL_S = 0.05
_ABORT_S = 4.0
"""Seconds for the engine to end what was aborted: a step or two."""


class DrainingServer(uvicorn.Server):
    """uvicorn's server with a life of its own.

    ``SIGTERM`` or ``SIGINT``: nobody new is let in, requests on open connections are answered 503, running ones get
    ``drain_timeout_s`` to finish and are then aborted, each with a last output. A second signal: connections are cut.
    If the engine dies, open requests end with its error, and then the server ends if it is configured so.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._watching: asyncio.Task[None] | None = None
        self.failed = False
        """It has ended because its engine died."""
        self._signal = ""
        """The first that came; told when the server's loop has it, as a handler may have interrupted the log."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Without uvicorn's memory of signals, which it would raise again when all is done."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._signal = self._signal or signal.Signals(sig).name

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._watch_engine())

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        running = self._state.admission.active
        if self._signal:
            logger.info("%s: shutting down; running requests: %d", self._signal, running)
        for server in self.servers:
            server.close()
        await self._drain()
        if self._watching is not None:
            self._watching.cancel()
        if self.force_exit:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await super().shutdown(sockets)
        logger.info("the server has stopped")

    async def _drain(self) -> None:
        admission, patience_s = self._state.admission, self._state.config.drain_timeout_s
        admission.drain()
        if admission.active:
            logger.info("running requests have %g s to finish (%d left)", patience_s, admission.active)
        until = time.monotonic() + patience_s
        while self._waits(until):
            await asyncio.sleep(_POLL_S)
        if admission.active:
            logger.warning("%d requests have not finished and are aborted", admission.active)
        until = time.monotonic() + _ABORT_S
        while self._waits(until):
            with suppress(DynaspecError):  # the engine has died meanwhile: they have ended
                await self._state.llm.abort_all()  # again and again: one may not have reached the engine yet
            await asyncio.sleep(_POLL_S)

    def _waits(self, until: float) -> bool:
        """Something runs, there is time, and no second signal has come. To be asked often: a signal wakes nobody."""
        return self._state.admission.active > 0 and time.monotonic() < until and not self.force_exit

    async def _watch_engine(self) -> None:
        why = await self._state.llm.wait_ended()
        logger.error("%s", why)
        if self._state.config.shutdown_on_engine_death:
            self.failed = self.should_exit = True
