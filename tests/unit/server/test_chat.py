from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynaspec import LLM, AsyncLLM, SamplingParams
from dynaspec.contract.errors import ConfigError
from dynaspec.server.inputs import check_template
from support.engines import PlainDecoding
from unit.server.serving import Client, make_app, texts_of

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "max_tokens": 24}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}{{ m.name | default('') }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}={{ c.function.name }}({{ c.function.arguments.x }}){% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{{ mood | default('') }}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
async def templated(llm: AsyncLLM) -> AsyncIterator[Client]:
    """A server with a chat template of its own, that shows tools."""
    one = Client(make_app(llm, chat_template=TEMPLATE))
    yield one
    await one.close()


async def prompt_of(client: Client, **body: Any) -> str:
    """What the template makes of a conversation."""
    tokens = (await client.ask("/tokenize", **body))["tokens"]
    text: str = (await client.ask("/detokenize", tokens=tokens))["prompt"]
    return text


async def test_an_answer_is_that_of_llm_chat(client: Client, plain: PlainDecoding) -> None:
    known = chat_text(plain.llm, HI, temperature=0.0, max_tokens=24)
    answer = await client.ask(PATH, messages=HI, **GREEDY)
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": known, "refusal": None}
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert texts_of(await client.stream(PATH, messages=HI, **GREEDY)) == {0: known}


def chat_text(llm: LLM, messages: list[dict[str, str]], **params: Any) -> str:
    [output] = llm.chat(messages, SamplingParams(**params))
    return output.outputs[0].text


async def test_seeded_answers(client: Client, plain: PlainDecoding) -> None:
    [known] = plain.llm.chat(HI, SamplingParams(seed=4, n=3, max_tokens=12, temperature=0.9))
    body = {"messages": HI, "seed": 4, "n": 3, "max_completion_tokens": 12, "temperature": 0.9}
    texts = {one.index: one.text for one in known.outputs}
    answer = await client.ask(PATH, **body)
    assert {one["index"]: one["message"]["content"] for one in answer["choices"]} == texts
    assert texts_of(await client.stream(PATH, **body)) == texts
    assert answer["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in known.outputs)


async def test_without_a_limit_an_answer_goes_on_as_long_as_it_can(client: Client) -> None:
    answer = await client.ask(PATH, messages=HI, temperature=0, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_logprobs(client: Client, plain: PlainDecoding, llm: AsyncLLM) -> None:
    [known] = plain.llm.chat(HI, SamplingParams(temperature=0.0, max_tokens=24, logprobs=2))
    completion = known.outputs[0]
    answer = await client.ask(PATH, messages=HI, logprobs=True, top_logprobs=2, **GREEDY)
    told = answer["choices"][0]["logprobs"]
    assert told["refusal"] is None
    assert completion.logprobs is not None
    chosen = [
        by_token[token].logprob for by_token, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    assert [entry["logprob"] for entry in told["content"]] == chosen
    spelled = [llm.tokenizer.token_bytes(token) for token in completion.token_ids]
    assert [bytes(entry["bytes"]) for entry in told["content"]] == spelled
    for entry in told["content"]:
        first, second = entry["top_logprobs"]
        assert first["logprob"] >= second["logprob"]
    chunks = await client.stream(PATH, messages=HI, logprobs=True, top_logprobs=2, **GREEDY)
    streamed = [entry for chunk in chunks[1:] for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == told["content"]


async def test_the_chosen_token_alone(client: Client) -> None:
    answer = await client.ask(PATH, messages=HI, logprobs=True, **GREEDY)
    assert all(entry["top_logprobs"] == [] for entry in answer["choices"][0]["logprobs"]["content"])
    silent = await client.ask(PATH, messages=HI, **GREEDY)
    assert silent["choices"][0]["logprobs"] is None


async def test_prompt_tokens_and_their_logprobs(client: Client, llm: AsyncLLM) -> None:
    tokens = (await client.ask("/tokenize", messages=HI))["tokens"]
    body: dict[str, Any] = {"messages": HI, "prompt_logprobs": 1, "return_token_ids": True, **GREEDY}
    answer = await client.ask(PATH, **body)
    assert answer["prompt_token_ids"] == tokens
    assert len(answer["prompt_logprobs"]) == len(tokens)
    opening, first, *others = await client.stream(PATH, **body)
    assert {name: first[name] for name in ("prompt_token_ids", "prompt_logprobs")} == {
        name: answer[name] for name in ("prompt_token_ids", "prompt_logprobs")
    }
    assert not any("prompt_token_ids" in chunk for chunk in (opening, *others))


async def test_roles_and_parts(templated: Client) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 3}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    expected = "<system>Be brief.\n<userAnn>a\nb\n<assistant>=f(3)\n<tool>4\n<assistant>"
    assert await prompt_of(templated, messages=messages) == expected


async def test_an_answers_message_can_be_sent_back(templated: Client) -> None:
    answer = await templated.ask(PATH, messages=HI, **GREEDY)
    said = answer["choices"][0]["message"]
    again = {**said, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    prompt = await prompt_of(templated, messages=[*HI, again, *HI])
    assert prompt == f"<user>hi\n<assistant>{said['content']}\n<user>hi\n<assistant>"


async def test_what_the_template_is_told(templated: Client) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    assert await prompt_of(templated, messages=HI, add_generation_prompt=False) == "<user>hi\n"
    assert await prompt_of(templated, messages=messages, continue_final_message=True) == "<user>hi\n<assistant>Well,"
    assert await prompt_of(templated, messages=HI, chat_template_kwargs={"mood": "!"}) == "<user>hi\n!<assistant>"
    prompt = await prompt_of(templated, messages=HI, tools=[TOOL])
    assert prompt.startswith('[{"type": "function", "function": {"name": "add", "description": "Adds."')


async def test_tools_are_shown_unless_none_may_be_called(templated: Client) -> None:
    lengths = [
        (await templated.ask(PATH, messages=HI, tools=[TOOL], tool_choice=choice, **GREEDY))["usage"]["prompt_tokens"]
        for choice in ("auto", "none")
    ]
    bare = (await templated.ask(PATH, messages=HI, **GREEDY))["usage"]["prompt_tokens"]
    assert lengths[0] > lengths[1] == bare


CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_in_an_answer(templated: Client, llm: AsyncLLM, stream: bool) -> None:
    """The model is made to write one, token by token."""
    steps = forced(llm, f"Let me see. {CALL}")
    [call], content, reason = await called(templated, stream, tools=[TOOL], **steps)
    assert (call["function"], call["type"]) == ({"name": "add", "arguments": '{"x": 1}'}, "function")
    assert call["id"].startswith("call_")
    assert (content, reason) == ("Let me see.", "tool_calls")
    calls, content, reason = await called(templated, stream, tools=[TOOL], tool_choice="none", **steps)
    assert (calls, content, reason) == ([], f"Let me see. {CALL}", "stop")


WRITTEN = {
    "hermes": CALL,
    "llama3_json": '{"name": "add", "parameters": {"x": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"x": 1}}]',
    "pythonic": "[add(x=1)]",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool_format", WRITTEN)
async def test_calls_in_every_format(llm: AsyncLLM, tool_format: str, stream: bool) -> None:
    client = Client(make_app(llm, chat_template=TEMPLATE, tool_call_parser=tool_format))
    [call], content, reason = await called(client, stream, tools=[TOOL], **forced(llm, WRITTEN[tool_format]))
    assert (call["function"], content, reason) == ({"name": "add", "arguments": '{"x": 1}'}, "", "tool_calls")
    await client.close()


async def test_a_template_without_tools_gets_them_in_words(client: Client) -> None:
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]  # fmt: skip
    prompt = await prompt_of(client, messages=history, tools=[TOOL])
    assert prompt.startswith("[system] You may call functions")
    assert '"name": "add"' in prompt
    assert '[assistant] <tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>' in prompt
    assert prompt.endswith("[user] <tool_response>\n2\n</tool_response>\n[assistant] ")


async def test_the_format_is_that_of_the_template(llm: AsyncLLM) -> None:
    client = Client(make_app(llm, chat_template="{# [TOOL_CALLS] #}" + TEMPLATE))
    steps = forced(llm, WRITTEN["mistral"])
    [call], _, reason = await called(client, False, tools=[TOOL], **steps)
    assert (call["function"]["name"], reason) == ("add", "tool_calls")
    assert call["id"].isalnum()
    assert len(call["id"]) == 9
    await client.close()


def forced(llm: AsyncLLM, text: str) -> dict[str, Any]:
    """Wishes that leave one text as the only possible output."""
    return {"structured_outputs": {"choice": [text]}, "max_tokens": len(llm.tokenizer.encode(text)) + 40}


async def called(client: Client, stream: bool, **body: Any) -> tuple[list[dict[str, Any]], str, str]:
    """(tool calls, content, finish reason) of an answer."""
    if not stream:
        [choice] = (await client.ask(PATH, messages=HI, seed=1, **body))["choices"]
        message = choice["message"]
        return message.get("tool_calls", []), message["content"] or "", choice["finish_reason"]
    chunks = await client.stream(PATH, messages=HI, seed=1, **body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    return calls, texts_of(chunks)[0], choices[-1]["finish_reason"]


async def test_a_stream_begins_with_the_role(client: Client) -> None:
    first, *others = await client.stream(PATH, messages=HI, **GREEDY)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in others)
    assert [chunk["choices"][0]["finish_reason"] is not None for chunk in others] == [False] * (len(others) - 1) + [
        True
    ]
    assert len({chunk["id"] for chunk in (first, *others)}) == 1


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({}, "messages", "lacks the field"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "is 'robot'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "lacks the field"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages.0.content.0.type", "text alone"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
     "messages.0.content.0.type", "text alone"),
    ({"messages": [{"role": "assistant"}]}, "messages.0.content", "neither content nor tool calls"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "Unicode"),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages", "at least"),
    ({"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "one of them"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"messages": HI, "max_tokens": 255}, "max_tokens", "the model takes 256"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs", "logprobs to be true"),
    ({"messages": HI, "tools": [{"type": "web_search"}]}, "tools.0.type", "only functions"),
    ({"messages": HI, "tool_choice": "always"}, "tool_choice", "'required'"),
    ({"messages": HI, "functions": []}, "functions", "tools"),
    ({"messages": HI, "reasoning_effort": "high"}, "reasoning_effort", "null"),
    ({"messages": HI, "modalities": ["audio"]}, "modalities", "text"),
    ({"messages": HI, "chat_template": "x"}, "chat_template", "--chat-template"),
    ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "messages", "meaning of its own"),
    ({"messages": HI, "add_generation_prompt": True, "continue_final_message": True}, "messages", "not compatible"),
    ({"messages": HI, "response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"messages": HI, "response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "one form"),
    ({"messages": HI, "structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "exactly one"),
    ({"messages": HI, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
    ({"messages": HI, "logprobs": 2}, "logprobs", "true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_cannot_be_is_refused_in_a_sentence(
    client: Client, body: dict[str, Any], param: str | None, words: str
) -> None:
    for stream in (False, True):
        error = await client.refused(PATH, stream=stream, **body)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert words in error["message"]


async def test_arguments_that_are_no_object(templated: Client) -> None:
    function = {"name": "f", "arguments": "[1]"}
    messages = [{"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}]
    error = await templated.refused(PATH, messages=messages)
    assert error["param"] == "messages.0.tool_calls.0.function.arguments"


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages[0] }", "x\n{% frobnicate %}"])
def test_a_template_that_is_none_is_told_beforehand(llm: AsyncLLM, template: str) -> None:
    with pytest.raises(ConfigError, match=r"chat_template is wrong at line .*; expected a Jinja template") as caught:
        check_template(llm.tokenizer, template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[1].content + nothing }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
    ],
)
def test_what_a_template_refuses_is_seen_with_a_conversation(llm: AsyncLLM, template: str) -> None:
    check_template(llm.tokenizer, template)


async def test_a_template_that_refuses(llm: AsyncLLM) -> None:
    client = Client(make_app(llm, chat_template="{{ raise_exception('no ' + messages[0].role + ' here') }}"))
    error = await client.refused(PATH, messages=HI)
    assert "no user here" in error["message"]
    await client.close()
