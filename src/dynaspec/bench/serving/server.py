"""A server under test: what it says of itself, and the requests that prepare a load test."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from dynaspec.contract.errors import DynaspecError

from .settings import Target

_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=6 * 60 * 60)
"""Of a request under load: a queue may be long."""
_QUESTION_TIMEOUT = aiohttp.ClientTimeout(total=60)
"""Of a question about the server."""
_POLL_S = 0.5
_IDLE_S = 4.0
"""Idle connections are closed after this long: sooner than servers close theirs, or a request could meet the end of
its connection and be lost."""
_REFUSED = (401, 403)
OWN = "dynaspec"
"""Who owns the models of a dynaspec server."""


class ServerError(DynaspecError, RuntimeError):
    """The server under test cannot be reached, or refuses what a load test needs."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is asked for."""

    name: str
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None if the server does not say."""
    owner: str | None = None
    root: str | None = None
    """The checkpoint's name or path."""

    @property
    def is_own(self) -> bool:
        """It is a dynaspec server's."""
        return self.owner == OWN


class Server:
    """Questions to a server. Requests under load go through ``session`` themselves."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self.session = session
        self.target = target
        self.headers = target.request_headers()

    async def get(self, path: str) -> bytes | None:
        """The body of an answer with status 200; None for any other.

        Raises:
            ServerError: nobody answers, or the key is wrong.
        """
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of an answer with status 200; None for any other, or if it is no JSON.

        Raises:
            ServerError: nobody answers, or the key is wrong.
        """
        return _parsed(await self._ask("POST", path, body))

    async def models(self) -> list[Mapping[str, Any]] | None:
        """Entries of ``/v1/models``; None if the server has no such list.

        Raises:
            ServerError: nobody answers, or the key is wrong.
        """
        value = _parsed(await self.get("/v1/models"))
        entries = value.get("data") if isinstance(value, Mapping) else None
        return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else None

    async def served(self) -> Served:
        """The model asked for, or the server's first.

        Raises:
            ServerError: nobody answers, the key is wrong, the model is not served, or neither the settings nor the
                server name one.
        """
        wanted, entries = self.target.model, await self.models()
        if wanted is None and not entries:
            raise ServerError(f"{self.target.root} names no model at /v1/models; expected one, or --model")
        if not entries:
            return Served(str(wanted))
        names = [str(entry.get("id")) for entry in entries]
        if wanted is not None and wanted not in names:
            raise ServerError(f"the model {wanted!r} is not served at {self.target.root}; expected {_listed(names)}")
        entry = entries[0 if wanted is None else names.index(wanted)]
        return Served(str(entry.get("id")), entry.get("max_model_len"), entry.get("owned_by"), entry.get("root"))

    async def wait(self, timeout_s: float) -> None:
        """Waits until the server lists its models.

        Raises:
            ServerError: it does not in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if await self.models() is not None:
                    return
                why = "/v1/models is not there"
            except ServerError as error:
                why = str(error)
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerError(f"{self.target.root} was not ready after {timeout_s:g} s: {why}")
            await asyncio.sleep(min(_POLL_S, left))

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes | None:
        url = self.target.root + path
        try:
            async with self.session.request(
                method, url, json=body, headers=self.headers, timeout=_QUESTION_TIMEOUT
            ) as response:
                if response.status in _REFUSED:
                    raise ServerError(f"{url} refuses with status {response.status}; expected a key, see --api-key")
                content = await response.read()
                return content if response.status == 200 else None
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or type(error).__name__
            raise ServerError(f"no server answers at {self.target.root} ({why}); expected one there") from None


@asynccontextmanager
async def connect(target: Target) -> AsyncIterator[Server]:
    """A server with a pool of connections that sets no limit of its own."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=_REQUEST_TIMEOUT) as session:
        yield Server(session, target)


def _parsed(body: bytes | None) -> Any:
    if body is None:
        return None
    try:
        return json.loads(body)
    except ValueError:
        return None


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)
