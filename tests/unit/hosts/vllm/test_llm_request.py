"""Parameters as vLLM's and outputs as dynaspec's, over plain values in vLLM's shape."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from dynaspec.contract.errors import RequestError
from dynaspec.contract.outputs import Logprob, RequestMetrics
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from dynaspec.hosts.vllm.llm_request import OURS, REFUSED, SAME, TRANSLATED, LiveRequest, vllm_params, with_drafts


def test_every_parameter_is_accounted_for() -> None:
    named = [*SAME, *OURS, *TRANSLATED, *REFUSED]
    assert sorted(named) == sorted(field.name for field in fields(SamplingParams))


def test_parameters_pass_under_their_names() -> None:
    params = SamplingParams(n=2, temperature=0.5, stop=["a"], seed=3, logprobs=2, bad_words=["x"], max_tokens=None)
    values = vllm_params(params, speculates=True)
    assert values.items() >= {"n": 2, "temperature": 0.5, "seed": 3, "logprobs": 2, "max_tokens": None}.items()
    assert (values["stop"], values["bad_words"], values["output_kind"]) == (["a"], ["x"], "CUMULATIVE")
    assert "extra_args" not in values


def test_limits_on_drafts_travel_in_extra_args() -> None:
    values = vllm_params(SamplingParams(max_draft_tokens=0), speculates=True)
    assert values["extra_args"] == {"dynaspec": {"num_speculative_tokens": 0}}


def test_forms_of_the_output() -> None:
    form = StructuredOutputsParams(choice=["yes", "no"])
    values = vllm_params(SamplingParams(structured_outputs=form), speculates=False)
    assert values["structured_outputs"] == {"choice": ["yes", "no"], "disable_any_whitespace": False}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"expected_acceptance": 0.5}, "expected_acceptance is 0.5; expected None"),
        ({"seed": -1}, "seed is -1"),
        ({"min_p": 0.1}, "min_p is 0.1; expected 0.0"),
        ({"logit_bias": {3: 1.0}}, "logit_bias is"),
    ],
)
def test_what_vllm_cannot_honour(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        vllm_params(SamplingParams(**given), speculates=True)


def test_more_is_there_without_speculation() -> None:
    values = vllm_params(SamplingParams(min_p=0.1, logit_bias={3: 1.0}), speculates=False)
    assert (values["min_p"], values["logit_bias"]) == (0.1, {3: 1.0})


# --- outputs ------------------------------------------------------------------------------------------------------


def piece(index: int, text: str, tokens: list[int], **more: Any) -> SimpleNamespace:
    values = {"logprobs": None, "cumulative_logprob": None, "finish_reason": None, "stop_reason": None}
    return SimpleNamespace(index=index, text=text, token_ids=tokens, **{"spec_decode_metrics": None, **values, **more})


def told(*pieces: SimpleNamespace, finished: bool = False, **more: Any) -> SimpleNamespace:
    values = {"prompt": "p", "prompt_token_ids": [7], "prompt_logprobs": None, "num_cached_tokens": None}
    times = SimpleNamespace(scheduled_ts=1.0, first_token_ts=2.0, last_token_ts=3.0, num_preemptions=1)
    return SimpleNamespace(outputs=list(pieces), finished=finished, **{"metrics": times, **values, **more})


def drafts(per_step: list[tuple[int, int]], longest: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        histogram=[sum(accepted == j for _, accepted in per_step) for j in range(longest + 1)],
        num_draft_tokens=sum(drafted for drafted, _ in per_step),
        per_step_drafted=[drafted for drafted, _ in per_step],
        per_step_accepted=[accepted for _, accepted in per_step],
    )


def test_a_finished_request() -> None:
    entry = {5: SimpleNamespace(logprob=-0.5, rank=1, decoded_token="a")}
    live = LiveRequest("r", SamplingParams(speculation_metrics="detailed", logprobs=1))
    end = piece(
        0, "abc", [5, 6, 8, 9], logprobs=[entry] * 4, cumulative_logprob=-2.0, finish_reason="stop", stop_reason="c",
        spec_decode_metrics=drafts([(4, 2), (1, 0)]),
    )  # fmt: skip
    output = live.take(told(end, finished=True, num_cached_tokens=3, prompt_logprobs=[None, entry]))
    [one] = output.outputs
    assert (output.request_id, output.prompt, output.prompt_token_ids, output.finished) == ("r", "p", (7,), True)
    assert (one.text, one.token_ids, one.finish_reason, one.stop_reason) == ("abc", (5, 6, 8, 9), "stop", "c")
    assert one.logprobs == ({5: Logprob(-0.5, 1, "a")},) * 4
    assert output.prompt_logprobs == (None, {5: Logprob(-0.5, 1, "a")})
    metrics = one.metrics
    assert (metrics.scheduled_s, metrics.first_token_s, metrics.finished_s) == (1.0, 2.0, 3.0)
    assert (metrics.preemptions, metrics.cached_tokens, output.num_cached_tokens) == (1, 3, 3)
    assert (metrics.drafts, metrics.drafted, metrics.verified, metrics.accepted) == (2, 5, 5, 2)
    assert (metrics.draft_emitted, metrics.per_step) == (4, ((4, 2), (1, 0)))
    assert (metrics.drafted_per_pos, metrics.accepted_per_pos) == ((2, 1, 1, 1), (1, 1, 0, 0))


def test_steps_are_those_that_emitted_but_for_the_prefill_s() -> None:
    # One token from the prefill, 3 + 1 from drafts, 2 from plain steps.
    assert with_drafts(RequestMetrics(), drafts([(4, 2), (1, 0)]), 7, "summary").steps == 4


@pytest.mark.parametrize("level", ["off", "summary"])
def test_less_is_said_of_drafts_where_less_is_asked(level: Any) -> None:
    metrics = with_drafts(RequestMetrics(), drafts([(4, 2)]), 4, level)
    assert (metrics.drafts, metrics.per_step) == ((0, ()) if level == "off" else (1, ()))


def test_outputs_have_all_continuations() -> None:
    live = LiveRequest("r", SamplingParams(n=2))
    assert [one.text for one in live.take(told(piece(1, "x", [1]))).outputs] == ["", "x"]
    assert [one.text for one in live.take(told(piece(0, "y", [2]))).outputs] == ["y", "x"]


def test_deltas_carry_what_is_new() -> None:
    live = LiveRequest("r", SamplingParams(n=2, output_kind=RequestOutputKind.DELTA))
    assert [one.token_ids for one in live.take(told(piece(0, "a", [1]))).outputs] == [(1,), ()]
    assert [one.token_ids for one in live.take(told(piece(1, "b", [2, 3]))).outputs] == [(), (2, 3)]
    end = piece(1, "c", [4], finish_reason="length", spec_decode_metrics=drafts([(1, 1)]))
    assert live.take(told(end)).outputs[1].metrics.steps == 1


def test_an_aborted_request_says_so_where_it_was_not_finished() -> None:
    live = LiveRequest("r", SamplingParams(n=2))
    assert [one.finish_reason for one in live.aborted().outputs] == ["abort", "abort"]
    live.take(told(piece(0, "a", [1], finish_reason="stop")))
    output = live.aborted()
    assert ([one.finish_reason for one in output.outputs], output.finished) == (["stop", "abort"], True)


def test_without_vllm_s_statistics_times_stay_open() -> None:
    live = LiveRequest("r", SamplingParams())
    output = live.take(told(piece(0, "a", [1], finish_reason="stop"), finished=True, metrics=None))
    assert (output.outputs[0].metrics.finished_s, output.outputs[0].metrics.arrival_s > 0) == (0.0, True)
