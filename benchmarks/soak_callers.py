"""Requests at random whose answers are known: each is a function of prompt, parameters and seed alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

import aiohttp

from dynaspec.bench.serving.client import EventStream
from dynaspec.contract.outputs import CompletionOutput, RequestOutput
from dynaspec.contract.sampling_params import SamplingParams

_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "max_tokens", "ignore_eos"),
    *("stop", "logprobs"),
)
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request, greedy or seeded."""

    prompt: tuple[int, ...]
    params: SamplingParams

    def body(self, *, stream: bool) -> dict[str, Any]:
        """The same as the body of a request to ``/v1/completions``, which has the tokens' ids in its answer."""
        given = {name: getattr(self.params, name) for name in _FIELDS}
        told = {name: value for name, value in given.items() if value != _DEFAULTS[name] or name == "max_tokens"}
        return {"prompt": list(self.prompt), "stream": stream, "return_token_ids": True, **told}


def draw_requests(
    count: int, *, vocab_size: int, longest_prompt: int, most_tokens: int, seed: int
) -> list[RequestSpec]:
    """Requests of all lengths."""
    dice = random.Random(seed)
    return [_request(dice, vocab_size, longest_prompt, most_tokens) for _ in range(count)]


def _request(dice: random.Random, vocab_size: int, longest_prompt: int, most_tokens: int) -> RequestSpec:
    prompt = tuple(dice.randrange(1, vocab_size) for _ in range(dice.randrange(1, longest_prompt + 1)))
    options: dict[str, Any] = {
        "max_tokens": dice.randrange(1, most_tokens + 1),
        "temperature": dice.choice((0.0, 0.7, 1.0)),
        "ignore_eos": dice.random() < 0.5,
        "repetition_penalty": dice.choice((1.0, 1.0, 1.2)),
        "logprobs": dice.choice((None, None, None, 2)),
        "stop": dice.choice((None, None, ("e", "an"))),
    }
    if options["temperature"]:
        options |= {
            "seed": dice.randrange(1000),
            "top_p": dice.choice((1.0, 0.9)),
            "top_k": dice.choice((0, 20)),
            "n": dice.choice((1, 1, 1, 2)),
        }
    return RequestSpec(prompt, SamplingParams(**options))


@dataclass(frozen=True, slots=True)
class Choice:
    """What may be compared of one continuation; while it comes, what there is of it."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    """Of the tokens, if the request has any."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def begins(self, whole: Choice) -> bool:
        """It may become ``whole``."""
        return (
            whole.token_ids[: len(self.token_ids)] == self.token_ids
            and whole.text.startswith(self.text)
            and whole.logprobs[: len(self.logprobs)] == self.logprobs
        )


Answer = Sequence[Choice]
"""A choice for each continuation."""


def known_answer(output: RequestOutput) -> list[Choice]:
    """What a server must answer where an engine gives this."""
    return [_choice(completion) for completion in output.outputs]


def _choice(completion: CompletionOutput) -> Choice:
    chosen = zip(completion.token_ids, completion.logprobs or (), strict=False)
    return Choice(
        tuple(completion.token_ids),
        completion.text,
        tuple(candidates[token].logprob for token, candidates in chosen),
        completion.finish_reason,
        completion.stop_reason,
    )


Fate = Literal["read", "dawdle", "leave", "cancel"]
"""The answer is read; read slowly; the connection is closed after some events; or after some time."""

_FATES: tuple[Fate, ...] = ("read", "read", "read", "dawdle", "leave", "cancel")


@dataclass(frozen=True, slots=True)
class Visit:
    """A request, and how its caller behaves."""

    request: int
    stream: bool
    fate: Fate
    leave_after_s: float
    """Of who cancels; and the pause of who dawdles."""
    events: int
    """After which who leaves has seen enough, or who dawdles pauses."""


@dataclass(frozen=True, slots=True)
class Blunder:
    """A request that must be refused."""

    name: str
    status: int
    """Of the answer."""
    body: bytes
    method: str = "POST"
    path: str = "/v1/completions"


BLUNDERS = (
    Blunder("no JSON", 400, b'{"prompt": '),
    Blunder("no object", 400, b"[1, 2]"),
    Blunder("no prompt", 400, b"{}"),
    Blunder("empty prompt", 400, b'{"prompt": ""}'),
    Blunder("token outside the vocabulary", 400, b'{"prompt": [999999999]}'),
    Blunder("text as a number", 400, b'{"prompt": "a", "temperature": "hot"}'),
    Blunder("number out of range", 400, b'{"prompt": "a", "top_p": 7}'),
    Blunder("longer than the model", 400, b'{"prompt": [' + b"5, " * 20_000 + b"5]}"),
    Blunder("unknown model", 404, b'{"model": "nobody", "prompt": "a"}'),
    Blunder("unknown path", 404, b"{}", path="/v1/nothing"),
    Blunder("wrong method", 405, b"", method="GET"),
    Blunder("chat without messages", 400, b'{"messages": []}', path="/v1/chat/completions"),
)

Call = Visit | Blunder


def draw_calls(requests: int, *, leave_after_s: float, seed: int, blunders: float = 0.03) -> Iterator[Call]:
    """Calls without end.

    Args:
        requests: how many there are to choose from.
        leave_after_s: the longest that somebody has.
        blunders: share of the calls.
    """
    dice = random.Random(seed)
    while True:
        if dice.random() < blunders:
            yield dice.choice(BLUNDERS)
            continue
        yield Visit(
            request=dice.randrange(requests),
            stream=dice.random() < 0.7,
            fate=dice.choice(_FATES),
            leave_after_s=dice.random() ** 2 * leave_after_s,
            events=dice.randrange(1, 8),
        )


End = Literal["answered", "left", "cancelled", "refused", "broken"]
"""Whole answer; closed by the caller, after events or after a time; refused as it should; anything else."""

_PATH = "/v1/completions"
_DONE = b"[DONE]"


@dataclass(slots=True)
class Result:
    """What became of a call."""

    end: End
    choices: list[Choice] = field(default_factory=list)
    """Of the answer, as far as it came."""
    why: str = ""
    """Where something broke."""


class _Broken(Exception):
    """The server did what it must not."""


class Caller:
    """Makes calls to a server, any number at once."""

    def __init__(self, session: aiohttp.ClientSession, url: str, requests: Sequence[RequestSpec]) -> None:
        self._session = session
        self._url = url
        self._requests = requests

    async def call(self, call: Call) -> Result:
        """Makes one; what goes wrong is in the result."""
        try:
            return await (self._blunder(call) if isinstance(call, Blunder) else self._visit(call))
        except _Broken as error:
            return Result("broken", why=str(error))
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            return Result("broken", why=f"{type(error).__name__}: {error}")

    async def _blunder(self, blunder: Blunder) -> Result:
        headers = {"Content-Type": "application/json"}
        async with self._session.request(
            blunder.method, self._url + blunder.path, data=blunder.body, headers=headers
        ) as response:
            told = await response.read()
            if response.status != blunder.status:
                raise _Broken(f"{blunder.name}: status {response.status}, expected {blunder.status}: {told[:200]!r}")
            if not json.loads(told)["error"]["message"]:
                raise _Broken(f"{blunder.name}: the error has no message")
        return Result("refused")

    async def _visit(self, visit: Visit) -> Result:
        request = self._requests[visit.request]
        choices = [Choice() for _ in range(request.params.n)]
        asking = asyncio.create_task(self._ask(request, visit, choices))
        try:
            await asyncio.wait([asking], timeout=visit.leave_after_s if visit.fate == "cancel" else None)
        finally:
            asking.cancel()
        await asyncio.wait([asking])
        return Result("cancelled" if asking.cancelled() else asking.result(), choices)

    async def _ask(self, request: RequestSpec, visit: Visit, choices: list[Choice]) -> End:
        async with self._session.post(self._url + _PATH, json=request.body(stream=visit.stream)) as response:
            if response.status != 200:
                raise _Broken(f"status {response.status}: {(await response.read())[:200]!r}")
            if visit.stream:
                return await self._read_events(response, visit, choices)
            for choice in (await response.json())["choices"]:
                _add(choices, choice)
            return "answered"

    async def _read_events(self, response: aiohttp.ClientResponse, visit: Visit, choices: list[Choice]) -> End:
        events, seen = EventStream(), 0
        async for received in response.content.iter_any():
            for event in events.feed(received):
                if event == _DONE:
                    return "answered"
                seen += 1
                for choice in json.loads(event)["choices"]:
                    _add(choices, choice)
                if visit.fate == "leave" and seen == visit.events:
                    response.close()
                    return "left"
            if visit.fate == "dawdle" and seen >= visit.events:
                await asyncio.sleep(visit.leave_after_s)
        raise _Broken("a stream ended without [DONE]")


def _add(choices: list[Choice], told: Mapping[str, Any]) -> None:
    """Joins what an answer or an event says of a choice to what is known of it."""
    known = choices[told["index"]]
    if known.finish_reason is not None:
        raise _Broken("a choice goes on after its end")
    logprobs = told["logprobs"]["token_logprobs"] if told.get("logprobs") else ()
    choices[told["index"]] = Choice(
        (*known.token_ids, *told["token_ids"]),
        known.text + told["text"],
        (*known.logprobs, *logprobs),
        told["finish_reason"],
        told.get("stop_reason"),
    )


_KEPT = 20
"""Descriptions of what went wrong."""


@dataclass(slots=True)
class Tally:
    """What became of all calls."""

    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    """That were received."""
    wrong: int = 0
    """Answers, or beginnings of answers, that are not those of a single run."""
    problems: list[str] = field(default_factory=list)
    """The first of what is wrong or broken."""

    @property
    def calls(self) -> int:
        return sum(self.ends.values())

    @property
    def failed(self) -> int:
        return self.wrong + self.ends["broken"]

    def add(self, call: Call, result: Result, known: Sequence[Answer]) -> None:
        """Checks a result and counts it."""
        self.ends[result.end] += 1
        if result.end == "broken":
            self._note(f"{call}: {result.why}")
        elif not isinstance(call, Blunder):
            self.tokens += sum(len(choice.token_ids) for choice in result.choices)
            if not _right(result, known[call.request]):
                self.wrong += 1
                self._note(f"{call}: got {result.choices}, expected {known[call.request]}")

    def _note(self, problem: str) -> None:
        if len(self.problems) < _KEPT:
            self.problems.append(problem)


def _right(result: Result, known: Answer) -> bool:
    if result.end == "answered":
        return result.choices == list(known)
    return all(found.begins(whole) for found, whole in zip(result.choices, known, strict=True))


class MakesCalls(Protocol):
    """``Caller``, or a test's."""

    async def call(self, call: Call) -> Result: ...


async def drive(
    caller: MakesCalls, calls: Iterator[Call], known: Sequence[Answer], concurrency: int, go_on: Callable[[], bool]
) -> Tally:
    """Makes calls until there are no more, or no more are wanted.

    Args:
        known: the answer to each request.
        go_on: asked before every call.
    """
    tally = Tally()

    async def work() -> None:
        while go_on() and (call := next(calls, None)) is not None:
            tally.add(call, await caller.call(call), known)

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work())
    return tally
