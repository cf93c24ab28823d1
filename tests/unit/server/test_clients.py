"""What widely used clients send, field by field, and what they read in the answers. Each was run against a server.

The server is strict: fields that it did not know would be refused. ``test_openai_client.py`` has the official client.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from dynaspec import AsyncLLM, SamplingParams
from support.engines import PlainDecoding
from support.workloads import PROMPTS
from unit.server.serving import MODEL, Client, events_of, make_app

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}\n{% endfor %}{% if tools %}T{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "properties": {"x": {"enum": [1, 22]}},
            "required": ["x"],
            "type": "object",
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
async def server(llm: AsyncLLM) -> AsyncIterator[Client]:
    options: dict[str, Any] = {"strict": True, "chat_template": TEMPLATE, "metrics_namespace": "vllm"}
    one = Client(make_app(llm, per_request_spec_decode_metrics="detailed", **options))
    yield one
    await one.close()


async def events(server: Client, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """The events of a stream, for a body that asks for one."""
    response = await server.send(path, json.dumps(body).encode(), **headers)
    assert response.status_code == 200, response.text
    return events_of(response.text)


def plain_tokens(plain: PlainDecoding, prompt: str, count: int) -> list[int]:
    [output] = plain.outputs([prompt], [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)])
    return list(output.outputs[0].token_ids)


def is_function_call(call: dict[str, Any]) -> bool:
    function = call["function"]
    return bool(call["id"]) and function["name"] == "add" and json.loads(function["arguments"])["x"] in (1, 22)


async def test_langchain_calls_a_tool_and_tells_its_answer(server: Client) -> None:
    question = [{"content": "s", "role": "system"}, {"content": "1+1?", "role": "user"}]
    common = {"model": MODEL, "max_completion_tokens": 100, "seed": 1, "tools": [TOOL]}
    demanded = {**common, "messages": question, "parallel_tool_calls": False, "tool_choice": "required"}
    answer = await server.ask(CHAT, **demanded, stream=False)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert is_function_call(call)
    assert call["type"] == "function"
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert {"prompt_tokens", "completion_tokens", "total_tokens"} <= answer["usage"].keys()

    chunks = await events(server, CHAT, {**demanded, "stream": True, "stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    assert [call["index"] for call in calls] == [0]
    assert is_function_call(calls[0])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 0

    named = {"type": "function", "function": {"name": "add"}}
    strict = {**TOOL["function"], "strict": True}  # type: ignore[dict-item]
    tools = [{"type": "function", "function": strict}]
    answer = await server.ask(CHAT, **(common | {"tools": tools}), messages=question, tool_choice=named)
    assert is_function_call(answer["choices"][0]["message"]["tool_calls"][0])

    told = [
        *question,
        {"content": None, "role": "assistant", "tool_calls": [call]},
        {"content": "2", "role": "tool", "tool_call_id": call["id"]},
    ]
    short = common | {"max_completion_tokens": 4, "temperature": 0.0, "tool_choice": "auto"}
    answer = await server.ask(CHAT, **short, messages=told, stream=False)
    assert isinstance(answer["choices"][0]["message"]["content"], str)


async def test_langchains_completions(server: Client) -> None:
    neutral = {"frequency_penalty": 0, "logprobs": None, "n": 1, "presence_penalty": 0, "seed": None, "top_p": 1}
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 4, "temperature": 0.7, **neutral}
    answer = await server.ask(TEXT, **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(isinstance(choice["text"], str) for choice in answer["choices"])


async def test_litellm(server: Client) -> None:
    hi = [{"role": "user", "content": "hi"}]
    body = {"model": MODEL, "messages": hi, "max_tokens": 100, "tools": [TOOL], "top_k": 5, "seed": 1}
    answer = await server.ask(CHAT, **body, tool_choice="auto", parallel_tool_calls=True, ignore_eos=True)
    assert answer["model"] == MODEL
    assert answer["choices"][0]["finish_reason"] == "length"
    demanded = {"tool_choice": "required", "parallel_tool_calls": False}
    chunks = await events(server, CHAT, {**body, **demanded, "stream": True, "stream_options": {"include_usage": True}})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert ends == ["tool_calls"]
    answer = await server.ask(TEXT, model=MODEL, prompt=["a", "b"], stream=False, logprobs=1, max_tokens=3, echo=True)
    assert answer["object"] == "text_completion"
    assert len(answer["choices"]) == 2


@pytest.mark.parametrize(
    "settings", [{"ignore_eos": True, "temperature": 0.0}, {"ignore_eos": True, "temperature": 0.0, "min_tokens": 12}]
)
async def test_vllm_bench_serve(server: Client, plain: PlainDecoding, settings: dict[str, Any]) -> None:
    [first, *_] = (await server.get("/v1/models")).json()["data"]
    assert (first["id"], first["root"]) == (MODEL, MODEL)
    drafts_before = await spec_decode_counters(server)
    common = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **settings}
    text = {"prompt": PROMPTS[0], "repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None}
    chunks = await events(server, TEXT, {**common, **text}, **{"x-request-id": "bench-1"})
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == plain.llm.tokenizer.decode(
        plain_tokens(plain, PROMPTS[0], 12)
    )
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_completion_tokens": 12}
    for stream in (chunks, await events(server, CHAT, {**common, **chat})):
        *tokens, usage = stream
        assert all(chunk["choices"] for chunk in tokens)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 12
        assert usage["usage"]["prompt_tokens"] > 0
    after = await spec_decode_counters(server)
    for name in ("num_drafts", "num_draft_tokens"):
        assert after[name] > drafts_before.get(name, 0)
    assert after["num_accepted_tokens"] >= after["num_accepted_tokens_per_pos"] > 0


async def spec_decode_counters(server: Client) -> dict[str, float]:
    """As the client reads them: of the last position, where a counter has several."""
    lines = (await server.get("/metrics")).text.splitlines()
    prefix = "vllm:spec_decode_"
    pairs = [line.removeprefix(prefix).rsplit(maxsplit=1) for line in lines if line.startswith(prefix)]
    return {name.split("{")[0].removesuffix("_total"): float(value) for name, value in pairs if "_created" not in name}


@pytest.mark.parametrize("stop", [{}, {"stop": None}], ids=["newer", "older"])
async def test_guidellm(server: Client, stop: dict[str, Any]) -> None:
    assert (await server.get("/health")).status_code == 200
    assert (await server.get("/v1/models")).json()["data"][0]["id"] == MODEL
    options = {"include_usage": True, "continuous_usage_stats": True}
    common = {"model": MODEL, "stream": True, "stream_options": options, "ignore_eos": True, **stop}
    content = [{"type": "text", "text": "hello there"}]
    for path, fields in (
        (CHAT, {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 12}),
        (TEXT, {"prompt": "hello there", "max_tokens": 12}),
    ):
        chunks = await events(server, path, {**common, **fields})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
        assert counts == sorted(counts)
        assert counts[-1] == 12
        assert chunks[0]["id"]


async def test_guidellm_in_turns_with_tools(server: Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"status": "ok"}'},
    ]
    demanded = {"messages": messages, "tools": [TOOL], "tool_choice": "required", "stream": True}
    extras = {"seed": 1, "parallel_tool_calls": False}
    chunks = await events(server, CHAT, {"model": MODEL, **demanded, **extras})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    # The client goes through the list wherever a delta has the key.
    assert all(isinstance(delta.get("tool_calls", []), list) for delta in deltas)
    assert is_function_call(next(call for delta in deltas for call in delta.get("tool_calls", [])))
    answer = await server.ask(CHAT, model=MODEL, **(demanded | {"tool_choice": "none", "stream": False}), max_tokens=4)
    assert "tool_calls" not in answer["choices"][0]["message"]


async def test_aiperf(server: Client) -> None:
    settings = {"ignore_eos": True, "min_tokens": 10, "stream_options": {"include_usage": True}}
    hi = {"messages": [{"role": "user", "content": "one two one two"}]}
    body = {**hi, "model": MODEL, "stream": True, "max_completion_tokens": 10, **settings}
    text = {"prompt": ["one two one two"], "model": MODEL, "stream": True, "max_tokens": 10, **settings}
    for path, asked, kind in ((CHAT, body, "chat.completion.chunk"), (TEXT, text, "text_completion")):
        chunks = await events(server, path, asked)
        assert {chunk["object"] for chunk in chunks} == {kind}
        assert chunks[-1]["usage"]["completion_tokens"] == 10
        stats = chunks[-1]["metrics"]["speculative_decoding"]
        assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"] == len(stats["per_step_accepted"])
        assert {"mean_acceptance_length", "draft_acceptance_rate", "num_draft_tokens"} <= stats.keys()
    whole = {key: value for key, value in body.items() if key != "stream_options"}
    assert (await server.ask(CHAT, **(whole | {"stream": False})))["object"] == "chat.completion"


async def test_lm_evals_likelihoods(server: Client, plain: PlainDecoding) -> None:
    """``local-completions``: several prompts as token ids, of which the ends are judged."""
    pairs = [("1 2 3", " 4"), ("def f(", "x): return"), ("a", "b")]
    encode = plain.llm.tokenizer.encode
    contexts, whole = [encode(context) for context, _ in pairs], [encode(a + b) for a, b in pairs]
    answer = await server.ask(
        TEXT, model=MODEL, prompt=whole, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    outputs = plain.outputs([a + b for a, b in pairs], [SamplingParams(max_tokens=1, prompt_logprobs=1)] * 3)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(pairs)
    for choice, tokens, context, output in zip(choices, whole, contexts, outputs, strict=True):
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(tokens) + 1
        assert output.prompt_logprobs is not None
        known = [at[token].logprob for token, at in zip(tokens[1:], output.prompt_logprobs[1:], strict=True) if at]
        assert told["token_logprobs"][1:-1] == pytest.approx(known)
        # "Greedy" is what has the largest log-probability of those that are told.
        for chosen, top in list(zip(told["token_logprobs"], told["top_logprobs"], strict=True))[len(context) : -1]:
            assert chosen <= max(top.values())


@pytest.mark.parametrize("as_text", [False, True])
async def test_lm_evals_continuations(server: Client, plain: PlainDecoding, as_text: bool) -> None:
    prompts: list[Any] = ["1 2 3", "a b"]
    if not as_text:
        prompts = [plain.llm.tokenizer.encode(prompt) for prompt in prompts]
    common = {"model": MODEL, "max_tokens": 8, "temperature": 0, "seed": 1234}
    answer = await server.ask(TEXT, prompt=prompts, stop=["\n\n", "<|endoftext|>"], **common)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(isinstance(choice["text"], str) for choice in answer["choices"])
    hi = [{"role": "user", "content": "hi"}]
    answer = await server.ask(CHAT, messages=hi, stop=["\n\n"], **common)
    assert isinstance(answer["choices"][0]["message"]["content"], str)
    assert isinstance((await server.ask(CHAT, messages=hi, stop=[], **common))["choices"][0]["message"]["content"], str)


async def test_lm_eval_does_without_a_tokenizer_of_the_server(server: Client) -> None:
    """It asks for vLLM's ``/tokenizer_info``, and takes Hugging Face's tokenizer where there is none."""
    response: httpx.Response = await server.get("/tokenizer_info")
    assert response.status_code == 404
