"""Sends one request and takes the times of its answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .protocol import Api, Chunk, Usage, error_of, read_chunk
from .records import Failure, Record
from .sse import EventStream

_DONE = b"[DONE]"
_LONGEST_MESSAGE = 300
"""Characters of a server's answer that are kept where it is no error object."""


class _RequestFailed(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)


@dataclass(slots=True)
class _Answer:
    """What has come of an answer so far."""

    chunks_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    last_s: float = 0.0
    streamed: bool = True
    finished: bool = False
    usage: Usage | None = None
    speculation: Mapping[str, Any] | None = None

    def add(self, chunk: Chunk, now: float) -> None:
        if chunk.has_choice:
            self.last_s = now
            self.texts.append(chunk.text)
            self.finished |= chunk.finish_reason is not None
        if chunk.has_output:
            self.chunks_s.append(now)
        self.usage = chunk.usage or self.usage
        self.speculation = chunk.speculation or self.speculation


async def send(
    session: aiohttp.ClientSession,
    url: str,
    api: Api,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    clock: Callable[[], float] = time.perf_counter,
) -> Record:
    """Sends a request and reads its answer to the end. Whatever goes wrong is in the record, not raised."""
    answer = _Answer()
    failure = None
    start = clock()
    try:
        async with session.post(url, json=body, headers=headers) as response:
            await _read(response, api, answer, clock)
        _check_complete(answer)
    except _RequestFailed as error:
        failure = error.failure
    except TimeoutError:
        failure = Failure("timed out", "the answer took longer than the client waits")
    except aiohttp.ClientConnectorError as error:
        failure = Failure("not connected", str(error))
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, ConnectionError) as error:
        failure = Failure("connection lost", str(error) or type(error).__name__)
    except aiohttp.ClientError as error:
        failure = Failure("unreadable answer", f"{type(error).__name__}: {error}")
    return Record(
        start_s=start,
        end_s=answer.last_s or clock(),
        chunks_s=tuple(answer.chunks_s),
        text="".join(answer.texts),
        usage=answer.usage,
        output_tokens=answer.usage.completion_tokens if answer.usage is not None else len(answer.chunks_s),
        streamed=answer.streamed,
        speculation=answer.speculation,
        failure=failure,
    )


async def _read(response: aiohttp.ClientResponse, api: Api, answer: _Answer, clock: Callable[[], float]) -> None:
    if response.status != 200:
        raise await _refused(response)
    if response.content_type == "application/json":
        answer.streamed = False
        whole = await response.read()
        _take(whole, api, answer, clock())
        return
    events = EventStream()
    async for received in response.content.iter_any():
        now = clock()  # before anything is parsed: the client's own time must not count
        for event in events.feed(received):
            _take(event, api, answer, now)
    for event in events.close():
        _take(event, api, answer, clock())


def _take(event: bytes, api: Api, answer: _Answer, now: float) -> None:
    if event == _DONE:
        answer.finished = True
        return
    try:
        value = json.loads(event)
    except ValueError:
        raise _RequestFailed("unreadable answer", f"an event is no JSON: {_shortened(event)}") from None
    error = error_of(value)
    if error is not None:
        raise _RequestFailed(f"error in the stream: {error[0]}", error[1])
    try:
        chunk = read_chunk(api, value)
    except (AttributeError, KeyError, TypeError):
        raise _RequestFailed("unreadable answer", f"an event is of no known form: {_shortened(event)}") from None
    answer.add(chunk, now)


def _check_complete(answer: _Answer) -> None:
    if not answer.chunks_s:
        raise _RequestFailed("no output", "the answer ended without a token")
    if not answer.finished:
        raise _RequestFailed("ended early", "the stream stopped before a finish reason")


async def _refused(response: aiohttp.ClientResponse) -> _RequestFailed:
    body = await response.read()
    try:
        error = error_of(json.loads(body))
    except ValueError:
        error = None
    if error is None:
        return _RequestFailed(f"HTTP {response.status}", _shortened(body) or str(response.reason))
    return _RequestFailed(f"HTTP {response.status} {error[0]}", error[1])


def _shortened(body: bytes) -> str:
    text = " ".join(body.decode("utf-8", "replace").split())
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"
