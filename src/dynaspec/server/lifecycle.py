"""The end of a server: what runs may finish, what does not finish is ended, and a dead engine ends everything."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from contextlib import suppress
from socket import socket
from types import FrameType

import uvicorn

from dynaspec.contract.errors import DynaspecError

from .state import ServerState

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
        self._failed = False
        self._signal = ""
        """The first that came; told when the server's loop has it, as a handler may have interrupted the log."""

    @property
    def failed(self) -> bool:
        """It has ended because its engine died."""
        return self._failed

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
            self._failed = self.should_exit = True
