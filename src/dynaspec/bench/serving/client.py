"""Requests of OpenAI's APIs: their bodies, one request sent, the events of its answer and their times."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import aiohttp

from dynaspec.contract.errors import ConfigError

Prompt = str | tuple[int, ...]
"""Text, or token ids."""
Json = Mapping[str, Any]
_DONE = b"[DONE]"
_LONGEST_MESSAGE = 300
"""Characters of a server's answer that are kept where it is no error object."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the server counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt's, those that came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """One event of a stream, or a whole answer."""

    has_choice: bool
    """It belongs to the continuation. The event that only carries usage does not."""
    has_output: bool
    """It brought tokens. A chat's opening event, which names the role, does not."""
    text: str
    finish_reason: str | None
    usage: Usage | None
    speculation: Json | None
    """What a dynaspec server says of the request's drafts."""


class Api(Protocol):
    """An endpoint's form of request and answer."""

    path: str
    suffix: str
    """What the path of such an endpoint ends with."""
    is_chat: bool

    def body(self, model: str, prompt: Prompt, output_len: int) -> dict[str, Any]:
        """The request's JSON, for a streamed answer with usage."""
        ...

    def text(self, choice: Json) -> tuple[str, bool]:
        """(text, has output) of a choice."""
        ...


class Completions:
    """``/v1/completions``: the prompt is continued as it is."""

    path = "/v1/completions"
    suffix = "completions"
    is_chat = False

    def body(self, model: str, prompt: Prompt, output_len: int) -> dict[str, Any]:
        given = prompt if isinstance(prompt, str) else list(prompt)
        return {"model": model, "prompt": given, "max_tokens": output_len, **_streamed()}

    def text(self, choice: Json) -> tuple[str, bool]:
        # Text may be empty where a token is special or a character incomplete: it is a token all the same.
        return choice.get("text") or "", True


class Chat:
    """``/v1/chat/completions``: the prompt is a user's message."""

    path = "/v1/chat/completions"
    suffix = "chat/completions"
    is_chat = True

    def body(self, model: str, prompt: Prompt, output_len: int) -> dict[str, Any]:
        if not isinstance(prompt, str):
            raise ConfigError("a chat's message is a list of token ids; expected text")
        messages = [{"role": "user", "content": prompt}]
        return {"model": model, "messages": messages, "max_completion_tokens": output_len, **_streamed()}

    def text(self, choice: Json) -> tuple[str, bool]:
        said = choice.get("delta") or choice.get("message") or {}
        content = said.get("content") or ""
        more = any(said.get(key) for key in ("reasoning_content", "reasoning", "tool_calls", "refusal"))
        opens = "role" in said and not content and not more and choice.get("finish_reason") is None
        return content, not opens


BACKENDS: Mapping[str, Api] = {
    "openai": Completions(),
    "openai-chat": Chat(),
    "vllm": Completions(),
    "dynaspec": Completions(),
}
"""Names of ``--backend``; ``vllm`` and ``dynaspec`` are other words for ``openai``."""


def find_api(backend: str) -> Api:
    """
    Raises:
        ConfigError: an unknown backend.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"the backend is {backend!r}; expected {', '.join(BACKENDS)}")
    return BACKENDS[backend]


def read_chunk(api: Api, event: Json) -> AnswerChunk:
    """What an event, or an answer that was not streamed, brought."""
    choices = event.get("choices")
    choice: Json = choices[0] if choices else {}
    text, has_output = api.text(choice) if choices else ("", False)
    return AnswerChunk(
        has_choice=bool(choices),
        has_output=has_output,
        text=text,
        finish_reason=choice.get("finish_reason"),
        usage=_usage(event.get("usage")),
        speculation=event.get("speculation") or choice.get("speculation"),
    )


def error_of(event: Any) -> tuple[str, str] | None:
    """(type, message) if an event or a body is an error object of OpenAI's or of older servers; None otherwise."""
    if not isinstance(event, Mapping):
        return None
    error = event.get("error")
    if isinstance(error, Mapping):
        return str(error.get("type") or "error"), str(error.get("message") or error)
    if isinstance(error, str):
        return "error", error
    if event.get("object") == "error" or "detail" in event:
        return str(event.get("type") or "error"), str(event.get("message") or event.get("detail"))
    return None


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, Mapping) or value.get("completion_tokens") is None:
        return None
    details = value.get("prompt_tokens_details") or {}
    return Usage(value.get("prompt_tokens") or 0, value["completion_tokens"], details.get("cached_tokens") or 0)


def _streamed() -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}}


class EventStream:
    """Cuts a ``text/event-stream`` into the data of its events. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Takes bytes, however they were split; gives the data of the events that are complete now."""
        *lines, self._line = (self._line + received).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """The event that a stream ended with, where its blank line is missing."""
        return self.feed(b"\n\n")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not answered."""

    kind: str
    """Groups failures, such as ``HTTP 400 invalid_request_error`` or ``connection lost``."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, with times of the client's monotonic clock, in seconds."""

    start_s: float
    """When it was sent."""
    end_s: float
    """When the last event of its continuation came."""
    chunks_s: tuple[float, ...] = ()
    """When each event with tokens came. With speculation an event brings several."""
    text: str = ""
    usage: Usage | None = None
    output_tokens: int = 0
    """The server's count; without one, the tokenizer's, or the number of chunks."""
    streamed: bool = True
    speculation: Mapping[str, Any] | None = None
    failure: Failure | None = None
    queued_s: float = 0.0
    """Seconds it waited in the client for its turn, because of ``--max-concurrency``."""

    @property
    def prompt_tokens(self) -> int:
        """The server's count; 0 where it gives none."""
        return self.usage.prompt_tokens if self.usage is not None else 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token. Of an answer that was not streamed, all of its time."""
        return self.chunks_s[0] - self.start_s

    @property
    def e2el_s(self) -> float:
        """From sending to the last token."""
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens, or if it was not streamed."""
        if self.output_tokens < 2 or not self.streamed:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Times between its chunks."""
        return tuple(after - before for before, after in pairwise(self.chunks_s))


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

    def add(self, chunk: AnswerChunk, now: float) -> None:
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
) -> RequestRecord:
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
    return RequestRecord(
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
