from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynaspec import AsyncLLM
from unit.server.serving import Client, error_of

HI = [{"role": "user", "content": "hi"}]


async def test_there_and_back(client: Client, llm: AsyncLLM) -> None:
    text = "the quick fox — naïve 日本 🙂"
    answer = await client.ask("/tokenize", model="tiny", prompt=text)
    assert answer == {
        "count": len(answer["tokens"]),
        "max_model_len": 256,
        "tokens": llm.tokenizer.encode(text),
    }
    assert await client.ask("/detokenize", tokens=answer["tokens"]) == {"prompt": text}


async def test_how_tokens_are_spelled(client: Client) -> None:
    answer = await client.ask("/tokenize", prompt=" the é", return_token_strs=True)
    assert "".join(answer["token_strs"]) == "ĠtheĠÃ©"


async def test_a_chat_has_the_tokens_that_it_is_answered_with(client: Client) -> None:
    tokens = (await client.ask("/tokenize", messages=HI))["tokens"]
    answer = await client.ask("/v1/chat/completions", messages=HI, max_tokens=1, return_token_ids=True)
    assert answer["prompt_token_ids"] == tokens


async def test_special_tokens_are_text_again(client: Client) -> None:
    assert await client.ask("/detokenize", tokens=[0]) == {"prompt": "<|end|>"}
    assert await client.ask("/detokenize", tokens=[]) == {"prompt": ""}


async def test_an_empty_text_has_no_tokens(client: Client) -> None:
    assert (await client.ask("/tokenize", prompt=""))["tokens"] == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_cannot_be(client: Client, path: str, body: dict[str, Any], param: str) -> None:
    assert (await client.refused(path, **body))["param"] == param


async def test_models(client: Client) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "other-name"]
    one = (await client.get("/v1/models/other-name")).json()
    assert one == listed["data"][1]
    assert (one["object"], one["created"], one["root"], one["max_model_len"]) == ("model", 7, "tiny", 256)
    unknown = await client.get("/v1/models/some/one")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")


async def test_a_model_that_is_not_served(client: Client) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
        response = await client.post(path, model="gpt-4", **body)
        assert (response.status_code, error_of(response)["param"]) == (404, "model")


async def test_the_event_loop_is_free_while_a_long_text_is_encoded(client: Client, llm: AsyncLLM) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count_turns())
    answer = await client.ask("/tokenize", prompt="the quick brown fox " * 5000)
    counting.cancel()
    assert answer["count"] > 5000
    assert turns > 100
