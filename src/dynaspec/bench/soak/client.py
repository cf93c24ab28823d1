"""One caller's way through a call, and what came back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from dynaspec.bench.serving.sse import EventStream

from .calls import Blunder, Call, Visit
from .wishes import Choice, Wish

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

    def __init__(self, session: aiohttp.ClientSession, url: str, wishes: Sequence[Wish]) -> None:
        self._session = session
        self._url = url
        self._wishes = wishes

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
        wish = self._wishes[visit.wish]
        choices = [Choice() for _ in range(wish.params.n)]
        asking = asyncio.create_task(self._ask(wish, visit, choices))
        try:
            await asyncio.wait([asking], timeout=visit.patience_s if visit.fate == "cancel" else None)
        finally:
            asking.cancel()
        await asyncio.wait([asking])
        return Result("cancelled" if asking.cancelled() else asking.result(), choices)

    async def _ask(self, wish: Wish, visit: Visit, choices: list[Choice]) -> End:
        async with self._session.post(self._url + _PATH, json=wish.body(stream=visit.stream)) as response:
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
                await asyncio.sleep(visit.patience_s)
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
