"""Bodies made to hurt: each gets an error object or an answer in bounded time, and the next request is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from dynaspec import AsyncLLM
from support.checkpoints import Pair
from unit.server.serving import Client, error_of, make_app

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
PATIENCE_S = 60.0
SHORT = {"prompt": "1 2 3 4", "max_tokens": 4, "temperature": 0}
HI = [{"role": "user", "content": "hi"}]
MANY = 9 * 2**20
"""Bytes: almost as many as a body may have."""


@pytest.fixture(scope="module")
def llm(tiny: Pair) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        tiny.target,
        speculative_config={"model": tiny.drafter, "policy": "constant", "num_speculative_tokens": 3},
        max_num_seqs=8,
    )
    yield engine
    engine.close()


@pytest.fixture
async def client(llm: AsyncLLM) -> AsyncIterator[Client]:
    one = Client(make_app(llm))
    yield one
    await one.close()


def nested(depth: int) -> dict[str, Any]:
    """A JSON schema of arrays of arrays."""
    kind: dict[str, Any] = {}
    for _ in range(depth):
        kind = {"type": "array", "items": kind}
    return kind


def doubling(levels: int) -> dict[str, Any]:
    """A JSON schema that means 2^levels properties."""
    steps = {
        f"s{i}": {
            "type": "object",
            "required": ["a", "b"],
            "properties": {name: {"$ref": f"#/$defs/s{i + 1}"} for name in "ab"},
        }
        for i in range(levels)
    }
    return {"$ref": "#/$defs/s0", "$defs": {**steps, f"s{levels}": {"type": "null"}}}


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a long text": (COMPLETIONS, {"prompt": "a" * MANY}),
    "a long text whose end is too long": (COMPLETIONS, {"prompt": "a " * 100_000, "truncate_prompt_tokens": 300}),
    "many tokens": (COMPLETIONS, {"prompt": [5] * (MANY // 3)}),
    "many prompts": (COMPLETIONS, {"prompt": ["a"] * (MANY // 5)}),
    "many empty prompts": (COMPLETIONS, {"prompt": [[]] * (MANY // 16)}),
    "many copies": (COMPLETIONS, {"prompt": "a", "n": 10**9}),
    "many copies of many prompts": (COMPLETIONS, {"prompt": ["a"] * 1000, "n": 128}),
    "no end": (COMPLETIONS, {"prompt": "a", "max_tokens": 10**18}),
    "more than fits": (COMPLETIONS, {"prompt": "a", "max_tokens": 2**31 - 1}),
    "many stop texts": (COMPLETIONS, {"prompt": "a", "stop": [f"stop {i}" for i in range(20_000)]}),
    "a long stop text": (COMPLETIONS, {"prompt": "a", "stop": "b" * MANY}),
    "many stop tokens": (COMPLETIONS, {"prompt": "a", "stop_token_ids": list(range(20_000))}),
    "many biases": (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(100_000)}}),
    "many bad words": (COMPLETIONS, {"prompt": "a", "bad_words": ["b"] * 20_000}),
    "a penalty that overflows": (COMPLETIONS, {"prompt": "a", "repetition_penalty": 5e-324}),
    "many messages": (CHAT, {"messages": HI * 100_000}),
    "a long message": (CHAT, {"messages": [{"role": "user", "content": "a" * MANY}]}),
    "many parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]}),
    "many tools": (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}] * 50_000}),
    "many tokens outside the vocabulary": (DETOKENIZE, {"tokens": [10**6] * 500_000}),
}
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "many unknown fields": (COMPLETIONS, {"prompt": "a"} | {f"x{i}": i for i in range(20_000)}),
    "many template variables": (CHAT, {"messages": HI, "chat_template_kwargs": {f"x{i}": i for i in range(20_000)}}),
    "a long text to tokenize": (TOKENIZE, {"prompt": "a" * 100_000}),
    "as many stop texts as may be": (COMPLETIONS, SHORT | {"stop": [f"stop {i}" * 100 for i in range(64)]}),
}
FORMS_REFUSED: dict[str, dict[str, Any]] = {
    "a schema of many levels": {"guided_json": nested(300)},
    "a schema that is text of many levels": {"guided_json": "[" * 100_000},
    "a schema that is itself alone": {"guided_json": {"$ref": "#"}},
    "a long regex": {"guided_regex": "a|" * 200_000 + "b"},
    "a regex that is none": {"guided_regex": "("},
    "a grammar that never ends": {"guided_grammar": "start: start"},
    "a grammar that is none": {"guided_grammar": "start: \x00"},
    "too many choices": {"guided_choice": ["a"] * (2**16 + 1)},
    "long choices": {"guided_choice": ["a" * 1000 + str(i) for i in range(4000)]},
}
FORMS_SERVED: dict[str, dict[str, Any]] = {
    "a schema that doubles": {"guided_json": doubling(40)},
    "a schema with a large automaton": {
        "guided_json": {"properties": {f"p{i}": {"type": "string", "pattern": "(a|b)*c{1,500}"} for i in range(3000)}}
    },
    "a regex of many copies": {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"},
    "a regex that backtracks": {"guided_regex": "(a*)*" * 200 + "b"},
    "a regex with a large automaton": {"guided_regex": "(a|b)*a" + "(a|b)" * 200},
    "a grammar that is ambiguous": {"guided_grammar": 'start: start start | "a" |'},
    "many choices": {"guided_choice": [f"choice {i}" for i in range(10_000)]},
}


async def send(client: Client, path: str, body: dict[str, Any]) -> httpx.Response:
    async with asyncio.timeout(PATIENCE_S):
        return await client.post(path, **body)


async def assert_unharmed(client: Client, llm: AsyncLLM) -> None:
    """The next request is served, nothing is left of the one before, and nobody else pays for it."""
    await client.ask(COMPLETIONS, **SHORT)
    seen = await llm.snapshot()
    assert (seen.running, seen.waiting, seen.kv_blocks_used) == (0, 0, 0)
    assert seen.counts.proposer_faults == 0


@pytest.mark.parametrize("kind", REFUSED)
async def test_what_is_too_much_is_refused(client: Client, llm: AsyncLLM, kind: str) -> None:
    response = await send(client, *REFUSED[kind])
    assert response.status_code == 400, response.text[:300]
    assert error_of(response)["type"] == "invalid_request_error"
    assert len(response.content) < 1000
    await assert_unharmed(client, llm)


@pytest.mark.parametrize("kind", SERVED)
async def test_what_is_much_is_served(client: Client, llm: AsyncLLM, kind: str) -> None:
    response = await send(client, *SERVED[kind])
    assert response.status_code == 200, response.text[:300]
    await assert_unharmed(client, llm)


@pytest.mark.parametrize("kind", FORMS_REFUSED)
async def test_forms_that_are_too_much_are_refused(client: Client, llm: AsyncLLM, kind: str) -> None:
    response = await send(client, COMPLETIONS, SHORT | FORMS_REFUSED[kind])
    assert response.status_code == 400, response.text[:300]
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.content) < 1000
    await assert_unharmed(client, llm)


@pytest.mark.parametrize("kind", FORMS_SERVED)
async def test_forms_that_are_much_are_followed_as_far_as_can_be(client: Client, llm: AsyncLLM, kind: str) -> None:
    """Or end with ``error`` where the grammar engine gives up."""
    response = await send(client, COMPLETIONS, SHORT | FORMS_SERVED[kind])
    assert response.status_code == 200, response.text[:300]
    assert response.json()["choices"][0]["finish_reason"] in ("length", "stop", "error")
    await assert_unharmed(client, llm)
