from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynaspec.contract.errors import RequestError
from dynaspec.contract.sampling_params import SamplingParams, StructuredOutputsParams
from dynaspec.engine.intake import Group, Intake
from unit.engine.texts import ByteTokenizer

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos


def make(prompt: Any, *, seed: int = 0, **params: Any) -> Group:
    intake = Intake(TOKENIZER, TOKENIZER.vocab_size, (EOS,), 32, seed)
    return intake.make("r", prompt, SamplingParams(**params))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("abc", "abc"),
        ({"prompt": "abc"}, "abc"),
        ([97, 98, 99], None),
        ((97, 98, 99), None),
        ([np.int64(97), 98, 99], None),
        ({"prompt_token_ids": [97, 98, 99]}, None),
        ({"prompt": None, "prompt_token_ids": [97, 98, 99]}, None),
    ],
)
def test_prompts_of_every_kind(prompt: Any, text: str | None) -> None:
    group = make(prompt)
    assert (group.prompt, group.prompt_token_ids) == (text, [97, 98, 99])
    assert group.requests[0].prompt.tolist() == [97, 98, 99]
    assert group.requests[0].prompt.dtype == np.int32


def test_all_continuations_have_the_salt() -> None:
    group = make({"prompt": "abc", "cache_salt": "mine"}, n=2)
    assert [request.cache_salt for request in group.requests] == ["mine", "mine"]
    assert make({"prompt": "abc", "cache_salt": None}).requests[0].cache_salt == ""


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ({}, "keys"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "keys"),
        ({"text": "a"}, "'text'"),
        (7, "int"),
        (None, "NoneType"),
        (b"abc", "bytes"),
        ([1, "a"], "list"),
        ([1.5], "list"),
        ([True], "list"),
        ({"prompt": 7}, "int"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt is ''; expected a non-empty string"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt is 7"),
        ([-1], "token id -1"),
        ([9999], "token id 9999"),
        ("x" * 32, "32 tokens but max_model_len is 32"),
        ("lone \ud800 surrogate", "Unicode"),
    ],
)
def test_prompts_that_cannot_be_served(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(prompt)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 9999}, "logprobs is 9999"),
        ({"prompt_logprobs": 9999}, "prompt_logprobs is 9999"),
        ({"allowed_token_ids": [9999]}, "9999"),
        ({"logit_bias": {9999: 1.0}}, "9999"),
    ],
)
def test_parameters_that_the_model_cannot_serve(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make("abc", **params)


def test_only_the_end_of_a_prompt_may_be_wanted() -> None:
    group = make("x" * 40 + "abc", truncate_prompt_tokens=3)
    assert group.prompt_token_ids == [97, 98, 99]


@pytest.mark.parametrize(("most", "length"), [(5, 8), (29, 32), (500, 32), (None, 32)])
def test_the_length_is_the_sooner_of_max_tokens_and_the_models(most: int | None, length: int) -> None:
    assert make("abc", max_tokens=most).requests[0].max_length == length


def test_stop_tokens() -> None:
    assert make("abc").requests[0].stop_ids == {EOS}
    assert make("abc", stop_token_ids=[5]).requests[0].stop_ids == {EOS, 5}
    assert make("abc", stop_token_ids=[5], ignore_eos=True).requests[0].stop_ids == {5}


def test_every_continuation_is_a_request_of_its_own() -> None:
    group = make("abc", n=3)
    assert len({request.id for request in group.requests}) == 3
    assert [request.n_index for request in group.requests] == [0, 1, 2]
    assert group.requests[0].text is not group.requests[1].text
    assert not group.finished
    for request in group.requests:
        request.end("abort", 1.0)
    assert group.finished


def test_seeds() -> None:
    assert [r.seed for r in make("abc", n=2, temperature=1.0).requests] == [
        r.seed for r in make("abc", n=2, temperature=1.0).requests
    ]
    assert make("abc", seed=1).requests[0].seed != make("abc", seed=2).requests[0].seed
    intake = Intake(TOKENIZER, TOKENIZER.vocab_size, (EOS,), 32, 0)
    first, second = (intake.make(name, "abc", SamplingParams()) for name in "ab")
    assert first.requests[0].seed != second.requests[0].seed
    given = SamplingParams(seed=5, n=2)
    assert [r.seed for r in intake.make("c", "abc", given).requests] == [5, 5]


def test_stop_tokens_that_can_never_come_are_no_error() -> None:
    assert 9999 in make("abc", stop_token_ids=[9999], min_tokens=1).requests[0].stop_ids


def test_text_is_made_only_where_it_is_wanted() -> None:
    assert make("abc", detokenize=False).requests[0].text is None


def test_bad_words_become_tokens() -> None:
    words = make("abc", bad_words=["stop"]).requests[0].bad_words
    assert (TOKENIZER.encode("stop")[0],) in words
    assert tuple(TOKENIZER.encode(" stop")) in words


THREE = StructuredOutputsParams(regex="[0-9]{3}")


def test_a_form_is_compiled_once_for_all_continuations() -> None:
    intake = Intake(TOKENIZER, TOKENIZER.vocab_size, (EOS,), 32, 0)
    params = SamplingParams(structured_outputs=THREE, n=2)
    intake.prepare(params)
    first, second = (intake.make(name, "abc", params) for name in "ab")
    grammars = {id(request.grammar) for group in (first, second) for request in group.requests}
    assert len(grammars) == 1
    assert first.requests[0].grammar is not None
    assert make("abc").requests[0].grammar is None


def test_behind_a_form_nothing_goes_on() -> None:
    assert make("abc", structured_outputs=THREE, ignore_eos=True).requests[0].stop_ids == {EOS}


def test_a_form_that_cannot_be_is_refused() -> None:
    intake = Intake(TOKENIZER, TOKENIZER.vocab_size, (EOS,), 32, 0)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    for refuse in (lambda: intake.prepare(params), lambda: intake.make("r", "abc", params)):
        with pytest.raises(RequestError, match=r"structured_outputs cannot be used: .*unclosed group"):
            refuse()
    intake.prepare(SamplingParams())


A = TOKENIZER.encode("a")[0]
ONE = TOKENIZER.encode("1")[0]
WORD = StructuredOutputsParams(regex="[b-z]+")


@pytest.mark.parametrize(
    ("params", "lists"),
    [
        ({"structured_outputs": WORD, "allowed_token_ids": [A, ONE]}, "allowed_token_ids"),
        ({"structured_outputs": WORD, "allowed_token_ids": [A, EOS], "min_tokens": 1}, "allowed_token_ids"),
        ({"structured_outputs": StructuredOutputsParams(choice=["1"]), "bad_words": ["1"]}, "bad_words"),
        (
            {"structured_outputs": THREE, "allowed_token_ids": [ONE, A], "bad_words": ["1"]},
            "allowed_token_ids and bad_words",
        ),
    ],
)
def test_a_form_that_the_token_lists_leave_no_beginning_is_refused(params: dict[str, Any], lists: str) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs and {lists} together leave no first token; expected"):
        make("abc", **params)


@pytest.mark.parametrize(
    "params",
    [
        {"structured_outputs": THREE, "allowed_token_ids": [ONE]},  # stuck behind the third digit only
        {"structured_outputs": THREE, "allowed_token_ids": [A, ONE], "bad_words": ["2"]},
        {"structured_outputs": THREE, "bad_words": ["12"]},
        {"structured_outputs": StructuredOutputsParams(regex="b?"), "allowed_token_ids": [A]},  # "" has it
        {"structured_outputs": StructuredOutputsParams(regex="b?"), "allowed_token_ids": [EOS]},
    ],
)
def test_a_form_that_can_begin_is_taken(params: dict[str, Any]) -> None:
    assert make("abc", **params).requests[0].grammar is not None


def test_parameters_may_be_changed_between_requests() -> None:
    intake = Intake(TOKENIZER, TOKENIZER.vocab_size, (EOS,), 32, 0)
    params = SamplingParams(temperature=0.5)
    first = intake.make("a", "abc", params)
    params.temperature, params.stop_token_ids = 0.0, [5]
    second = intake.make("b", "abc", params)
    assert (first.params.temperature, second.params.temperature) == (0.5, 0.0)
    assert second.requests[0].stop_ids == {EOS, 5}
    params.top_p = 2.0
    with pytest.raises(RequestError, match=r"top_p is 2\.0"):
        intake.make("c", "abc", params)


def test_a_prompt_of_more_than_text_is_refused() -> None:
    with pytest.raises(RequestError, match=r"'multi_modal_data'.*text alone"):
        make({"prompt": "abc", "multi_modal_data": {"image": 1}})
    assert make({"prompt": "abc", "multi_modal_data": None}).prompt == "abc"
