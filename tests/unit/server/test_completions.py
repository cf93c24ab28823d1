from __future__ import annotations

from typing import Any

import pytest

from dynaspec import AsyncLLM, SamplingParams
from support.engines import PlainDecoding
from support.workloads import PROMPTS
from unit.server.serving import MODEL, Client, texts_of

PATH = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 24}


def expected(plain: PlainDecoding, prompt: str, **params: Any) -> Any:
    """The continuation by plain decoding."""
    [output] = plain.outputs([prompt], [SamplingParams(**params)])
    return output.outputs[0]


@pytest.mark.parametrize("max_draft_tokens", [None, 0, 2])
async def test_greedy_text_is_plain_decodings(
    client: Client, plain: PlainDecoding, max_draft_tokens: int | None
) -> None:
    for prompt in PROMPTS:
        answer = await client.ask(PATH, prompt=prompt, max_draft_tokens=max_draft_tokens, **GREEDY)
        [choice] = answer["choices"]
        known = expected(plain, prompt, temperature=0.0, max_tokens=24)
        assert (choice["text"], choice["finish_reason"]) == (known.text, known.finish_reason)


@pytest.mark.parametrize("stream", [False, True])
async def test_seeded_text_is_plain_decodings(client: Client, plain: PlainDecoding, stream: bool) -> None:
    wishes = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 5, "max_tokens": 30, "n": 2}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    body = {"prompt": PROMPTS[0], **wishes, **penalties}
    [known] = plain.outputs([PROMPTS[0]], [SamplingParams(**wishes, **penalties)])
    if stream:
        texts = texts_of(await client.stream(PATH, **body))
    else:
        texts = texts_of([await client.ask(PATH, **body)])
    assert texts == {i: known.outputs[i].text for i in range(2)}


async def test_the_form_of_an_answer(client: Client) -> None:
    answer = await client.ask(PATH, model=MODEL, prompt="1 2 3", **GREEDY)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    [choice] = answer["choices"]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason"}
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 24 or choice["finish_reason"] == "stop"


async def test_answers_carry_the_models_first_name(client: Client) -> None:
    answer = await client.ask(PATH, model="other-name", prompt="1 2 3", **GREEDY)
    assert answer["model"] == MODEL


async def test_ids_come_from_the_request(client: Client) -> None:
    named = await client.ask(PATH, prompt="x", request_id="mine.1", **GREEDY)
    assert named["id"] == "cmpl-mine.1"
    response = await client.send(PATH, b'{"prompt": "x"}', **{"X-Request-Id": "abc"})
    assert (response.json()["id"], response.headers["x-request-id"]) == ("cmpl-abc", "abc")


async def test_prompts_in_every_form(client: Client, llm: AsyncLLM) -> None:
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    texts = texts_of([await client.ask(PATH, prompt=PROMPTS[:2], **GREEDY)])
    assert len(texts) == 2
    assert texts_of([await client.ask(PATH, prompt=ids, **GREEDY)]) == texts
    assert texts_of([await client.ask(PATH, prompt=ids[1], **GREEDY)]) == {0: texts[1]}
    assert texts_of([await client.ask(PATH, prompt=[PROMPTS[1]], **GREEDY)]) == {0: texts[1]}


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_numbered_prompt_by_prompt(client: Client, plain: PlainDecoding, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[:3], "n": 2, "seed": 3, "max_tokens": 12}
    known = plain.outputs(PROMPTS[:3], [SamplingParams(n=2, seed=3, max_tokens=12)] * 3)
    chunks = await client.stream(PATH, **body) if stream else [await client.ask(PATH, **body)]
    expected = {2 * i + k: output.outputs[k].text for i, output in enumerate(known) for k in range(2)}
    assert texts_of(chunks) == expected


async def test_usage_counts_each_prompt_once(client: Client, llm: AsyncLLM) -> None:
    answer = await client.ask(PATH, prompt=["1 2 3 4", "x"], n=3, seed=1, max_tokens=5, ignore_eos=True)
    lengths = [len(llm.tokenizer.encode(prompt)) for prompt in ("1 2 3 4", "x")]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    assert answer["usage"]["completion_tokens"] == 2 * 3 * 5


async def test_usage_says_what_the_prefix_cache_had(client: Client) -> None:
    prompt = "a b c d " * 20
    usages = [(await client.ask(PATH, prompt=prompt, max_tokens=1, temperature=0))["usage"] for _ in range(2)]
    first, second = (usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert (first, second % 16) == (0, 0)
    assert 0 < second < usages[1]["prompt_tokens"]


async def test_salts_share_no_prefix(client: Client) -> None:
    asked = {"prompt": "d c b a " * 20, "max_tokens": 1, "temperature": 0}
    answers = [await client.ask(PATH, **asked, cache_salt=salt) for salt in ("mine", "yours", "mine")]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


async def test_stop_strings_and_tokens(client: Client, plain: PlainDecoding) -> None:
    text = expected(plain, PROMPTS[0], temperature=0.0, max_tokens=24).text
    stop = text[4:6]
    answer = await client.ask(PATH, prompt=PROMPTS[0], stop=stop, **GREEDY)
    [choice] = answer["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    included = await client.ask(PATH, prompt=PROMPTS[0], stop=[stop], include_stop_str_in_output=True, **GREEDY)
    assert included["choices"][0]["text"] == text[: text.index(stop) + len(stop)]
    streamed = await client.stream(PATH, prompt=PROMPTS[0], stop=stop, **GREEDY)
    assert texts_of(streamed) == {0: text[: text.index(stop)]}
    token = expected(plain, PROMPTS[0], temperature=0.0, max_tokens=24).token_ids[3]
    ended = await client.ask(PATH, prompt=PROMPTS[0], stop_token_ids=[token], return_token_ids=True, **GREEDY)
    assert ended["choices"][0]["stop_reason"] == ended["choices"][0]["token_ids"][-1] == token


async def test_tokens_can_be_steered(client: Client) -> None:
    answer = await client.ask(PATH, prompt="x", allowed_token_ids=[66, 67], logit_bias={"67": -100}, **GREEDY)
    assert set(answer["choices"][0]["text"]) == {"b"}
    barred = await client.ask(PATH, prompt="x", allowed_token_ids=[66, 67], bad_words=["b"], **GREEDY)
    assert set(barred["choices"][0]["text"]) == {"c"}


async def test_a_form_ends_where_the_allowed_tokens_leave_nothing(client: Client) -> None:
    asked = {"prompt": "x", "allowed_token_ids": [66, 67], **GREEDY}
    whole = await client.ask(PATH, structured_outputs={"regex": "b{2}"}, **asked)
    stuck = await client.ask(PATH, structured_outputs={"regex": "b{2}a"}, **asked)
    assert [answer["choices"][0]["text"] for answer in (whole, stuck)] == ["bb", "bb"]
    assert [answer["choices"][0]["finish_reason"] for answer in (whole, stuck)] == ["stop", "error"]
    assert "leave no token" in stuck["choices"][0]["stop_reason"]


async def test_one_of_thousands_of_choices(client: Client) -> None:
    choices = [f"{number:05d}" for number in range(10_000)]
    answer = await client.ask(PATH, prompt="x", structured_outputs={"choice": choices}, **GREEDY)
    assert answer["choices"][0]["text"] in choices
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_only_the_end_of_a_prompt(client: Client, llm: AsyncLLM) -> None:
    tokens = llm.tokenizer.encode(PROMPTS[0])
    whole = await client.ask(PATH, prompt=tokens[-5:], return_token_ids=True, **GREEDY)
    cut = await client.ask(PATH, prompt=PROMPTS[0], truncate_prompt_tokens=5, return_token_ids=True, **GREEDY)
    assert cut["choices"] == whole["choices"]
    assert cut["choices"][0]["prompt_token_ids"] == tokens[-5:]
    assert cut["usage"]["prompt_tokens"] == 5


async def test_logprobs_are_the_engines(client: Client, plain: PlainDecoding, llm: AsyncLLM) -> None:
    known = expected(plain, PROMPTS[7], temperature=0.0, max_tokens=24, logprobs=2)
    answer = await client.ask(PATH, prompt=PROMPTS[7], logprobs=2, **GREEDY)
    told = answer["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [known.logprobs[i][t].logprob for i, t in enumerate(known.token_ids)]
    assert all(2 <= len(top) <= 3 for top in told["top_logprobs"])
    assert all(
        top[token] == logprob
        for top, token, logprob in zip(told["top_logprobs"], told["tokens"], told["token_logprobs"], strict=True)
    )


async def test_logprobs_of_a_stream_are_those_of_the_whole(client: Client) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[7], "logprobs": 1, "echo": True, **GREEDY}
    whole = (await client.ask(PATH, **body))["choices"][0]["logprobs"]
    chunks = await client.stream(PATH, **body)
    for name, values in whole.items():
        assert [value for chunk in chunks for value in chunk["choices"][0]["logprobs"][name]] == values


async def test_tokens_that_are_part_of_a_character_are_told_as_bytes(client: Client) -> None:
    answer = await client.ask(PATH, prompt="日", echo=True, logprobs=0, max_tokens=0)
    told = answer["choices"][0]["logprobs"]
    assert told["tokens"] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"]
    assert told["text_offset"] == [0, 0, 0]


async def test_echo(client: Client, plain: PlainDecoding, llm: AsyncLLM) -> None:
    known = expected(plain, PROMPTS[1], temperature=0.0, max_tokens=24, logprobs=1, prompt_logprobs=1)
    answer = await client.ask(PATH, prompt=PROMPTS[1], echo=True, logprobs=1, **GREEDY)
    [choice] = answer["choices"]
    assert choice["text"] == PROMPTS[1] + known.text
    told = choice["logprobs"]
    tokens = llm.tokenizer.encode(PROMPTS[1])
    assert len(told["tokens"]) == len(tokens) + len(known.token_ids)
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    whole = [t for t in range(len(tokens)) if not any("bytes" in token for token in told["tokens"][t - 1 : t + 1])]
    assert all(choice["text"].startswith(told["tokens"][t], told["text_offset"][t]) for t in whole)
    assert told["text_offset"][len(tokens)] == len(PROMPTS[1])


async def test_echo_of_token_ids_is_their_text(client: Client, llm: AsyncLLM) -> None:
    answer = await client.ask(PATH, prompt=llm.tokenizer.encode("the fox"), echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "the fox"


async def test_a_prompt_can_be_judged_without_being_continued(client: Client, plain: PlainDecoding) -> None:
    [known] = plain.outputs([PROMPTS[0]], [SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)])
    answer = await client.ask(PATH, prompt=PROMPTS[0], echo=True, logprobs=0, max_tokens=0, return_token_ids=True)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPTS[0], "length", [])
    assert known.prompt_logprobs is not None
    logprobs = zip(known.prompt_token_ids, known.prompt_logprobs, strict=True)
    assert choice["logprobs"]["token_logprobs"] == [None if p is None else p[token].logprob for token, p in logprobs]
    assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs(client: Client, llm: AsyncLLM) -> None:
    answer = await client.ask(PATH, prompt="1 2 3", prompt_logprobs=2, **GREEDY)
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for token, position in zip(llm.tokenizer.encode("1 2 3")[1:], others, strict=True):
        assert str(token) in position
        assert {entry["rank"] for entry in position.values()} >= {1, 2}


async def test_a_prompt_may_hold_no_special_tokens_or_be_taken_as_it_is(client: Client, llm: AsyncLLM) -> None:
    answer = await client.ask(PATH, prompt="x", add_special_tokens=False, return_token_ids=True, **GREEDY)
    assert answer["choices"][0]["prompt_token_ids"] == llm.tokenizer.encode("x", special_tokens=False)


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "prompt", "lacks the field 'prompt'"),
    ({"prompt": ""}, "prompt", "at least 1"),
    ({"prompt": []}, "prompt", "token ids"),
    ({"prompt": ["a", 1]}, "prompt.1", "text"),
    ({"prompt": [[1], []]}, "prompt.1", "at least 1"),
    ({"prompt": [True]}, "prompt", "token ids"),
    ({"prompt": [-1]}, "prompt.0", "at least 0"),
    ({"prompt": "a\udc00"}, "prompt", "Unicode"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
    ({"prompt": "a", "max_tokens": 256}, "max_tokens", "at most 255"),
    ({"prompt": "a " * 256}, "prompt", "at most 255"),
    ({"prompt": "a" * 100_000}, "prompt", "at least"),
    ({"prompt": "a", "best_of": 2}, "best_of", "n is 1"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "null"),
    ({"prompt": "a", "n": 2, "temperature": 0}, "n", "n=1"),
    ({"prompt": "a", "n": 129}, "n", "128"),
    ({"prompt": ["a"] * 33, "n": 2}, None, "66 continuations"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens", "max_tokens"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "20"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "integer"),
    ({"prompt": "a", "seed": 2**63}, "seed", "at most"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias.a", "matches"),
    ({"prompt": "a", "logit_bias": {"1000": 1}}, None, "1000"),
    ({"prompt": "a", "stop": [""]}, "stop.0", "at least 1"),
    ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
    ({"prompt": "a", "repetition_penalty": 1e-9}, "repetition_penalty", "at least 0.01"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature", "finite"),
    ({"prompt": "a", "stream": False, "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"prompt": "a", "use_beam_search": True}, "use_beam_search", "beam search"),
    (
        {"prompt": "a", "structured_outputs": {"regex": "a+"}, "allowed_token_ids": [66]},
        None,
        "structured_outputs and allowed_token_ids together leave no first token",
    ),
    ({"prompt": "a", "max_draft_tokens": 1, "speculation": {"max_draft_tokens": 2}}, "max_draft_tokens", "one of them"),
    ({"prompt": "a", "request_id": "a b"}, "request_id", "matches"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=lambda value: str(value)[:50])
async def test_what_cannot_be_is_refused_in_a_sentence(
    client: Client, body: dict[str, Any], param: str | None, words: str
) -> None:
    for stream in (False, True):
        error = await client.refused(PATH, **{"stream": stream, **body})
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert words in error["message"]


async def test_ids_outside_the_vocabulary_are_refused_before_a_stream_begins(client: Client) -> None:
    error = await client.refused(PATH, prompt=[[1], [320]], stream=True)
    assert "expected ids from 0 to 319" in error["message"]


async def test_a_model_that_is_not_served(client: Client) -> None:
    response = await client.post(PATH, model="gpt-4", prompt="x")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_fields_without_meaning_are_accepted(client: Client) -> None:
    plain = await client.ask(PATH, prompt="x", **GREEDY)
    nothing = {"user": "me", "suffix": None, "best_of": 1, "use_beam_search": False, "priority": 0, "logit_bias": None}
    answer = await client.ask(PATH, prompt="x", metadata={"a": "b"}, store=False, **nothing, **GREEDY)
    assert answer["choices"] == plain["choices"]
