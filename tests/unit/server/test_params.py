from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from dynaspec.engine.sampling_defaults import SamplingDefaults
from dynaspec.server.errors import ApiError
from dynaspec.server.inputs import chat_params, completion_params, form_of, reported_speculation
from dynaspec.server.protocol.chat import ChatRequest
from dynaspec.server.protocol.completions import CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


def test_without_wishes_the_defaults_are_the_engines() -> None:
    final = RequestOutputKind.FINAL_ONLY
    assert completion_params(completion()) == SamplingParams(output_kind=final)
    assert chat_params(chat(), None) == SamplingParams(max_tokens=None, output_kind=final)


def test_what_is_left_out_is_as_the_operator_says() -> None:
    own = SamplingDefaults({"temperature": 0.3, "top_k": 7, "max_tokens": 40})
    final: Any = {"output_kind": RequestOutputKind.FINAL_ONLY}
    known = SamplingParams(temperature=0.3, top_k=7, max_tokens=40, **final)
    assert chat_params(chat(), None, own) == known
    assert completion_params(completion(), own) == replace(known, max_tokens=16)
    asked = {"temperature": 1, "top_k": 0, "max_tokens": 90}
    assert chat_params(chat(**asked), None, own) == replace(known, temperature=1, top_k=0, max_tokens=90)
    limited = SamplingDefaults({}, most_tokens=12)
    for given, got in ((90, 12), (5, 5), (None, 12)):
        assert chat_params(chat(max_tokens=given), None, limited).max_tokens == got
        assert completion_params(completion(max_tokens=given), limited).max_tokens == got


def test_null_stands_for_the_default() -> None:
    names = ("n", "temperature", "top_p", "seed", "stop", "max_tokens", "logprobs", "stream", "logit_bias")
    assert completion_params(completion(**dict.fromkeys(names))) == completion_params(completion())


def test_wishes_reach_the_engine() -> None:
    same: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 10,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "seed": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "bad_words": ["c"],
        "allowed_token_ids": [5, 6],
        "skip_special_tokens": False,
        "max_tokens": 9,
        "logprobs": 4,
        "prompt_logprobs": 3,
        "truncate_prompt_tokens": 7,
    }
    params = completion_params(completion(stream=True, logit_bias={"6": 1.5}, **same))
    assert params == SamplingParams(logit_bias={6: 1.5}, output_kind=RequestOutputKind.DELTA, **same)


def test_wishes_about_drafts() -> None:
    wishes = {"max_draft_tokens": 2, "expected_acceptance": 0.7, "metrics": "detailed"}
    params = completion_params(completion(speculation=wishes))
    assert (params.max_draft_tokens, params.expected_acceptance, params.speculation_metrics) == (2, 0.7, "detailed")
    assert completion_params(completion(max_draft_tokens=3)).max_draft_tokens == 3
    assert completion_params(completion(max_draft_tokens=3, speculation={"max_draft_tokens": 3})).max_draft_tokens == 3
    assert completion_params(completion(speculation={"metrics": "off"})).speculation_metrics == "off"


@pytest.mark.parametrize(
    ("wishes", "told"), [(None, "off"), ({}, "off"), ({"metrics": "off"}, "off"), ({"metrics": "summary"}, "summary")]
)
def test_what_is_told_of_drafts(wishes: dict[str, str] | None, told: str) -> None:
    assert reported_speculation(completion(speculation=wishes)) == told


def test_the_logprobs_of_a_chat() -> None:
    assert chat_params(chat(), None).logprobs is None
    assert chat_params(chat(logprobs=True), None).logprobs == 0
    assert chat_params(chat(logprobs=True, top_logprobs=3), None).logprobs == 3


def test_either_name_of_the_limit() -> None:
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        assert chat_params(chat(**fields), None).max_tokens == 5


def test_echoed_prompts_have_logprobs_too() -> None:
    assert completion_params(completion(echo=True)).prompt_logprobs is None
    assert completion_params(completion(echo=True, logprobs=2)).prompt_logprobs == 2
    assert completion_params(completion(echo=True, logprobs=2, prompt_logprobs=3)).prompt_logprobs == 3
    assert completion_params(completion(logprobs=2)).prompt_logprobs is None


def test_calls_that_must_be_made_are_the_form() -> None:
    calls = StructuredOutputsParams(json=SCHEMA)
    assert chat_params(chat(), calls).structured_outputs is calls
    with pytest.raises(ApiError, match="one of the two"):
        chat_params(chat(response_format={"type": "json_object"}), calls)


FORMS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": '{"type": "object"}'}}, {"json": '{"type": "object"}'}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
     {"json_object": True, "disable_any_whitespace": True}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": SCHEMA, "whitespace_pattern": " ?"}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ["a"]}),
    ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "options"), FORMS)
def test_every_way_to_ask_for_a_form(fields: dict[str, Any], options: dict[str, Any] | None) -> None:
    expected = None if options is None else StructuredOutputsParams(**options)
    assert form_of(completion(**fields)) == form_of(chat(**fields)) == expected
    assert completion_params(completion(**fields)).structured_outputs == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
def test_forms_that_cannot_be(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        form_of(completion(**fields))
    assert (raised.value.status, raised.value.param) == (400, param)
