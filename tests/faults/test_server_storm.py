"""Thousands of HTTP requests at random, many of them left, cancelled or wrong, while memory runs short."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice

import aiohttp
import pytest

from dynaspec import AsyncLLM
from soak import read_load, until_idle
from soak_callers import (
    BLUNDERS,
    Call,
    Caller,
    Choice,
    Result,
    Tally,
    Visit,
    draw_calls,
    draw_wishes,
    drive,
    known_answer,
)
from support.checkpoints import VOCAB, Pair
from support.engines import PlainDecoding, kv_bytes
from support.http_server import Serving, serving
from support.storm import single_runs

REQUESTS, CONCURRENCY = 2000, 64
PATIENCE_S = 600.0
WISHES = draw_wishes(48, vocab_size=VOCAB, longest_prompt=40, most_tokens=24, seed=7)


@pytest.fixture(scope="module")
def known(plain: PlainDecoding) -> list[list[Choice]]:
    return [known_answer(output) for output in single_runs(plain, WISHES)]


@pytest.fixture
def llm(tiny: Pair) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        tiny.target,
        speculative_config={"model": tiny.drafter, "policy": "constant", "num_speculative_tokens": 3},
        max_num_seqs=16,
        kv_cache_memory=kv_bytes(7, tiny.target, tiny.drafter),
    )
    yield engine
    engine.close()


async def storm(server: Serving, calls: Iterator[Call], known: Sequence[Sequence[Choice]]) -> Tally:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(PATIENCE_S):
        tally = await drive(Caller(session, server.url, WISHES), calls, known, CONCURRENCY, lambda: True)
        load = await until_idle(session, server.url, PATIENCE_S)
    assert load.idle
    return tally


async def test_everyone_is_answered_once_or_gone_and_nothing_is_left(llm: AsyncLLM, known: list[list[Choice]]) -> None:
    calls = islice(draw_calls(len(WISHES), patience_s=0.2, seed=8), REQUESTS)
    async with serving(llm, access_log=False) as server:
        tally = await storm(server, calls, known)
        assert tally.problems == []
        assert tally.failed == 0
        assert tally.calls == REQUESTS
        assert min(tally.ends[end] for end in ("answered", "left", "cancelled", "refused")) > 20, tally.ends
        assert server.state.admission.active == 0
        seen = await llm.snapshot()
        await llm.verify_integrity()
    assert (seen.running, seen.waiting, seen.kv_blocks_used) == (0, 0, 0)
    assert seen.counts.preemptions > 0
    assert seen.counts.proposer_faults == 0
    ended = seen.totals.finished
    assert ended["abort"] > 0
    assert ended["error"] == 0
    whole = sum(ended[reason] for reason in ("stop", "length"))
    assert whole >= tally.ends["answered"]
    assert llm.healthy


async def test_all_blunders_are_refused(llm: AsyncLLM) -> None:
    async with serving(llm, access_log=False) as server, aiohttp.ClientSession() as session:
        caller = Caller(session, server.url, WISHES)
        for blunder in BLUNDERS:
            assert await caller.call(blunder) == Result("refused")
        assert (await read_load(session, server.url)).idle


async def test_a_wrong_answer_is_noticed(llm: AsyncLLM, known: list[list[Choice]]) -> None:
    """The check itself: one that takes every answer would pass every server."""
    visits = [Visit(wish, stream, "read", 0.0, 1) for wish in range(4) for stream in (False, True)]
    shifted = [*known[1:], known[0]]
    async with serving(llm, access_log=False) as server:
        tally = await storm(server, iter(visits), shifted)
    assert tally.ends == {"answered": len(visits)}
    assert tally.wrong == tally.failed == len(tally.problems) == len(visits)
