"""The official client against a server on a real port."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import openai
import pydantic
import pytest
import uvicorn
from fastapi import FastAPI

from dynaspec import AsyncLLM, SamplingParams
from support.engines import PlainDecoding
from support.workloads import PROMPTS
from unit.server.serving import MODEL, make_app

HI: Any = [{"role": "user", "content": "hi"}]


class Chosen(pydantic.BaseModel):
    x: Literal["a", "b"]


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Runs a server in a thread; the base of its API."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", ws="none", log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    [socket] = server.servers[0].sockets
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def url(llm: AsyncLLM) -> Iterator[str]:
    with serving(make_app(llm, api_key="right")) as base:
        yield base


@pytest.fixture(scope="module")
def sync(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="right", max_retries=0) as client:
        yield client


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key="right", max_retries=0) as one:
        yield one


def known_text(plain: PlainDecoding, prompt: str, **params: Any) -> str:
    [output] = plain.outputs([prompt], [SamplingParams(**params)])
    return output.outputs[0].text


def test_completions(sync: openai.OpenAI, plain: PlainDecoding) -> None:
    answer = sync.completions.create(model=MODEL, prompt=PROMPTS[0], temperature=0, max_tokens=20, logprobs=2)
    [choice] = answer.choices
    assert choice.text == known_text(plain, PROMPTS[0], temperature=0.0, max_tokens=20)
    assert answer.usage is not None
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == answer.usage.completion_tokens


def test_streamed_completions(sync: openai.OpenAI, plain: PlainDecoding) -> None:
    stream = sync.completions.create(
        model=MODEL, prompt=PROMPTS[:2], seed=7, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    texts = ["", ""]
    usage = None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == [known_text(plain, prompt, seed=7, max_tokens=20) for prompt in PROMPTS[:2]]
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_chats(sync: openai.OpenAI, plain: PlainDecoding) -> None:
    answer = sync.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_completion_tokens=20)
    [known] = plain.llm.chat(HI, SamplingParams(temperature=0.0, max_tokens=20))
    assert answer.choices[0].message.content == known.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None


async def test_streamed_chats(client: openai.AsyncOpenAI, plain: PlainDecoding) -> None:
    [known] = plain.llm.chat(HI, SamplingParams(seed=2, n=2, max_tokens=16))
    stream = await client.chat.completions.create(
        model=MODEL, messages=HI, seed=2, n=2, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    texts = ["", ""]
    reasons = ["", ""]
    usage = None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or ""
        usage = chunk.usage or usage
    assert texts == [one.text for one in known.outputs]
    assert reasons == [one.finish_reason for one in known.outputs]
    assert usage is not None
    assert usage.completion_tokens == sum(len(one.token_ids) for one in known.outputs)


async def test_the_clients_own_accumulator(client: openai.AsyncOpenAI, plain: PlainDecoding) -> None:
    [known] = plain.llm.chat(HI, SamplingParams(temperature=0.0, max_tokens=24))
    stop = known.outputs[0].text[5:7]
    async with client.chat.completions.stream(
        model=MODEL, messages=HI, temperature=0, max_tokens=24, stop=stop, logprobs=True, top_logprobs=1
    ) as stream:
        answer = await stream.get_final_completion()
    content = answer.choices[0].message.content
    assert content is not None
    assert content + stop == known.outputs[0].text[: len(content) + len(stop)]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is None
    spelled = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert spelled.decode("utf-8", "replace").startswith(content)


async def test_stop_strings(client: openai.AsyncOpenAI, plain: PlainDecoding) -> None:
    text = known_text(plain, PROMPTS[0], temperature=0.0, max_tokens=24)
    answer = await client.completions.create(
        model=MODEL, prompt=PROMPTS[0], temperature=0, max_tokens=24, stop=[text[5:7]]
    )
    assert answer.choices[0].text == text[: text.index(text[5:7])]
    assert answer.choices[0].finish_reason == "stop"


async def test_extras_go_both_ways(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL,
        prompt="1 2 3 4",
        temperature=0,
        extra_body={"top_k": 5, "ignore_eos": True, "speculation": {"metrics": "summary", "max_draft_tokens": 2}},
    )
    report = answer.choices[0].model_extra
    assert report is not None
    assert report["speculation"]["drafts"] > 0
    assert report["speculation"]["mean_acceptance_length"] <= 3


async def test_json_that_follows_a_schema(client: openai.AsyncOpenAI, llm: AsyncLLM) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["yes", "kind"],
        "additionalProperties": False,
    }
    # Left to itself, a random model never stops writing spaces.
    spaces = [token for token in range(320) if not llm.tokenizer.decode([token]).strip()]
    no_spaces: dict[str, Any] = {"logit_bias": {str(token): -100 for token in spaces}}
    format_: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answers = [
        (
            await client.chat.completions.create(
                model=MODEL, messages=HI, seed=3, max_tokens=200, response_format=format_, extra_body=extra
            )
        ).choices[0]
        for extra in (no_spaces, no_spaces | {"max_draft_tokens": 0})
    ]
    assert answers[0].message.content is not None
    found = json.loads(answers[0].message.content)
    assert isinstance(found["yes"], bool)
    assert found["kind"] in ("a", "b")
    assert answers[0].message == answers[1].message


async def test_errors(client: openai.AsyncOpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt="x", n=2, temperature=0, stream=True)
    assert refused.value.param == "n"
    with pytest.raises(openai.NotFoundError, match="gpt-4") as unknown:
        await client.completions.create(model="gpt-4", prompt="x")
    assert unknown.value.code == "model_not_found"
    async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_fields_that_there_are_not_are_ignored(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1, extra_body={"frob": 1})
    assert answer.choices[0].message.content is not None


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL, "other-name"]
    assert (await client.models.retrieve(MODEL)).owned_by == "dynaspec"


async def test_many_at_once(client: openai.AsyncOpenAI, plain: PlainDecoding) -> None:
    async def ask(i: int) -> str:
        answer = await client.completions.create(model=MODEL, prompt=PROMPTS[i % 8], seed=i, max_tokens=16)
        return answer.choices[0].text

    texts = await asyncio.gather(*(ask(i) for i in range(16)))
    assert texts == [known_text(plain, PROMPTS[i % 8], seed=i, max_tokens=16) for i in range(16)]


async def test_who_closes_a_stream_early_frees_the_engine(client: openai.AsyncOpenAI, llm: AsyncLLM) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt="x", temperature=1, n=8, max_tokens=250, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    while (snapshot := await llm.snapshot()).running or snapshot.waiting:
        pass
    await llm.verify_integrity()


async def test_a_tool_that_must_be_called(url: str, llm: AsyncLLM) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"enum": [1, 22]}}}},
    }
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(make_app(llm, chat_template=template)) as base:
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            for choice in ("required", {"type": "function", "function": {"name": "add"}}):
                answer = await client.chat.completions.create(
                    model=MODEL, messages=HI, seed=1, tools=[tool], tool_choice=choice, parallel_tool_calls=False
                )
                [call] = answer.choices[0].message.tool_calls
                assert call.function.name == "add"
                assert json.loads(call.function.arguments).get("x") in (None, 1, 22)
                assert answer.choices[0].finish_reason == "tool_calls"
                async with client.chat.completions.stream(
                    model=MODEL, messages=HI, seed=1, tools=[tool], tool_choice=choice, parallel_tool_calls=False
                ) as stream:
                    streamed = await stream.get_final_completion()
                [again] = streamed.choices[0].message.tool_calls
                assert again.function.arguments == call.function.arguments


def _streamed(client: openai.AsyncOpenAI) -> Callable[..., Awaitable[Any]]:
    async def send(**fields: Any) -> Any:
        async with client.chat.completions.stream(**fields) as stream:
            return await stream.get_final_completion()

    return send


async def test_a_conversation_with_tools_by_the_clients_own_helpers(llm: AsyncLLM) -> None:
    """Its helpers put what they have parsed into the messages that they send back."""
    tool: Any = openai.pydantic_function_tool(Chosen, name="choose")
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{% if tools %}T{% endif %}"
    with serving(make_app(llm, chat_template=template, strict=True)) as base:
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            for send in (client.chat.completions.parse, _streamed(client)):
                asked: dict[str, Any] = {"model": MODEL, "seed": 1, "tools": [tool]}
                answer = await send(**asked, messages=HI, tool_choice="required", parallel_tool_calls=False)
                message = answer.choices[0].message
                [call] = message.tool_calls
                assert isinstance(call.function.parsed_arguments, Chosen)
                told = {"role": "tool", "tool_call_id": call.id, "content": "done"}
                for said in (message, message.model_dump(), message.to_dict()):
                    again = await client.chat.completions.create(
                        **asked, messages=[*HI, said, told], max_tokens=4, tool_choice="none"
                    )
                    assert again.choices[0].message.content is not None
