"""HTTP connections that do not wait for ever: uvicorn's, and deadlines on what the client owes and leaves unread."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .asgi import as_response
from .errors import bad_request


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
        # Nothing more can be said to who does not listen, so what waits in the buffer is dropped with the connection.
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
