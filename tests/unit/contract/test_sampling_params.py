from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynaspec.contract.errors import DynaspecError, RequestError
from dynaspec.contract.sampling_params import GuidedDecodingParams, RequestOutputKind, SamplingParams


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert (params.max_draft_tokens, params.expected_acceptance, params.speculation_metrics) == (None, None, "summary")
    assert not params.greedy


EDGES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.0, "n": 1},
    {"top_k": -1},
    {"top_k": 0},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"presence_penalty": -2.0, "frequency_penalty": 2},
    {"repetition_penalty": 0.5},
    {"max_tokens": None, "min_tokens": 100},
    {"max_tokens": 5, "min_tokens": 5},
    {"logprobs": 0, "prompt_logprobs": -1},
    {"seed": -(2**62)},
    {"max_draft_tokens": 0},
    {"expected_acceptance": 0, "speculation_metrics": "off"},
    {"expected_acceptance": 1.0, "speculation_metrics": "detailed"},
    {"stop": [], "detokenize": False},
    {"stop_token_ids": []},
    {"n": 1024},
]


@pytest.mark.parametrize("given", EDGES, ids=str)
def test_values_at_the_edge_are_allowed(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    for name, value in given.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)


WRONG: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 1.0),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("temperature", "1"),
    ("temperature", None),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0),
    ("top_p", 1.01),
    ("min_p", -0.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 5e-324),
    ("repetition_penalty", -1.0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("min_tokens", -1),
    ("max_tokens", 0),
    ("seed", 2**63),
    ("seed", 1.0),
    ("seed", True),
    ("logprobs", -2),
    ("prompt_logprobs", True),
    ("truncate_prompt_tokens", 0),
    ("max_draft_tokens", -1),
    ("expected_acceptance", -0.01),
    ("expected_acceptance", 1.01),
    ("expected_acceptance", float("nan")),
    ("expected_acceptance", True),
    ("expected_acceptance", "0.5"),
    ("speculation_metrics", "all"),
    ("speculation_metrics", None),
    ("speculation_metrics", ["off"]),
    ("bad_words", "word"),
    ("stop", 5),
    ("stop_token_ids", 5),
    ("stop_token_ids", "12"),
    ("allowed_token_ids", {1, 2}),
    ("logit_bias", [1]),
    ("ignore_eos", "no"),
    ("detokenize", None),
    ("skip_special_tokens", 1),
    ("include_stop_str_in_output", 0),
    ("output_kind", "delta"),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda v: repr(v)[:20])
def test_a_wrong_value_is_named_with_what_is_expected(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is {value!r}; expected ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"logit_bias": {1: 100.5}}, r"logit_bias\[1\] is 100.5"),
        ({"logit_bias": {-1: 1.0}}, "a key of logit_bias is -1"),
        ({"logit_bias": {"²": 1.0}}, "a key of logit_bias is '²'"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [1, "2"]}, "a token id is '2'"),
        ({"stop_token_ids": [-1]}, "a token id is -1"),
        ({"stop": ["a", ""]}, "stop holds ''"),
        ({"stop": ""}, "stop holds ''"),
        ({"bad_words": [3]}, "bad_words holds 3"),
        ({"stop": ["x"] * 65}, "65 stop strings"),
        ({"min_tokens": 17}, "min_tokens is 17 but max_tokens is 16"),
        ({"stop": "x", "detokenize": False}, "stop strings need text"),
        ({"temperature": 0, "n": 2}, "n is 2 with temperature 0"),
    ],
    ids=str,
)
def test_what_a_list_holds_and_what_contradicts(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(**given)


def test_stop_strings_is_always_a_tuple() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_later_changes_by_the_caller_do_not_reach_it() -> None:
    stop, bias, allowed = ["a"], {1: 1.0}, [1]
    params = SamplingParams(stop=stop, logit_bias=bias, allowed_token_ids=allowed)
    stop.append("b")
    bias[2] = 2.0
    allowed.append(2)
    assert (params.stop_strings, params.logit_bias, params.allowed_token_ids) == (("a",), {1: 1.0}, (1,))


def test_json_keys_of_logit_bias_become_token_ids() -> None:
    assert SamplingParams(logit_bias={"50256": -100}).logit_bias == {50256: -100}


def test_older_names_of_structured_outputs() -> None:
    params = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a+", backend="auto"))
    assert params.structured_outputs == GuidedDecodingParams(regex="a+")
    with pytest.raises(RequestError, match="both given"):
        replace(params, guided_decoding=GuidedDecodingParams(regex="b"))


def test_its_errors_can_be_caught_as_dynaspecs_and_as_value_errors() -> None:
    assert issubclass(RequestError, DynaspecError)
    assert issubclass(RequestError, ValueError)


_VLLMS: list[tuple[str, list[Any], Any]] = [
    ("spaces_between_special_tokens", [True], False),
    ("logits_processors", [None, []], [print]),
    ("extra_args", [None, {}], {"a": 1}),
    ("flat_logprobs", [False], True),
    ("skip_reading_prefix_cache", [None, False], True),
]


@pytest.mark.parametrize(("name", "harmless", "other"), _VLLMS)
def test_vllms_other_fields_are_taken_with_what_happens_anyway(name: str, harmless: list[Any], other: Any) -> None:
    for value in harmless:
        params = SamplingParams(max_tokens=3, **{name: value})
        assert params == SamplingParams(max_tokens=3) == replace(params)
    with pytest.raises(RequestError, match=f"{name} is not available, as .*; expected {harmless[0]}"):
        SamplingParams(**{name: other})
