"""A client over a bare socket: it sends whatever bytes it likes, reads when it likes, and need not behave."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http.client import HTTPResponse
from typing import Any, cast

_AT_ONCE = 65536


class RawClient:
    """One connection. What the server does to it is no error here: a reset reads like an end."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        with suppress(ConnectionError):  # the server has had enough; what it said can still be read
            await self._loop.sock_sendall(self._socket, data)

    async def read(self) -> bytes:
        """What comes next; empty if nothing comes any more."""
        try:
            return await self._loop.sock_recv(self._socket, _AT_ONCE)
        except ConnectionError:
            return b""

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    def reset(self) -> None:
        """Breaks the connection off, as a client does that dies."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


@asynccontextmanager
async def raw_client(port: int, *, receive_buffer: int | None = None) -> AsyncIterator[RawClient]:
    """
    Args:
        receive_buffer: bytes that the system takes for a client that does not read; None = its usual.
    """
    with socket.socket() as connecting:
        if receive_buffer is not None:
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connecting.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connecting, ("127.0.0.1", port))
        yield RawClient(connecting)


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    """The head of a request; the connection is to be closed after the answer."""
    lines = [f"{method} {path} HTTP/1.1", "Host: server", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode()


def whole(path: str, body: dict[str, Any]) -> bytes:
    """A request with a body as JSON."""
    content = json.dumps(body).encode()
    return head(path, "Content-Type: application/json", f"Content-Length: {len(content)}") + content


def answer_of(data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (small letters) and body of the answer that ``data`` begins with.

    Raises:
        http.client.HTTPException: it is none, or not complete.
    """
    response = HTTPResponse(cast(socket.socket, _Bytes(data)))
    response.begin()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return response.status, headers, response.read()


class _Bytes:
    """As much of a socket as ``HTTPResponse`` needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)
