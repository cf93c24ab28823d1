"""``LLM(backend="vllm")`` against vLLM's own greedy decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dynaspec.api import LLM
from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from dynaspec.metrics import Counter, Gauge, Histogram, Vector
from hosts.vllm.engines import MODELS, engine_options

PROMPTS = ["The history of the city", "def main():\n    ", "Once upon a time there was a"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, speculation_metrics="detailed")


def options() -> dict[str, Any]:
    return {name: value for name, value in engine_options().items() if name != "model"}


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    llm = LLM(str(MODELS / "target"), backend="vllm", **options())
    outputs = llm.generate(PROMPTS, GREEDY)
    assert llm.stats().draft_tokens == 0
    llm.close()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    one = LLM(str(MODELS / "target"), backend="vllm", speculative_config={"model": str(MODELS / "draft")}, **options())
    yield one
    one.verify_integrity()
    one.close()


def test_drafting_changes_no_token(plain: list[tuple[int, ...]], llm: LLM) -> None:
    before = llm.stats()
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert [output.prompt for output in outputs] == PROMPTS
    done = llm.stats() - before
    assert done.drafts > 0
    assert done.accepted > 0


def test_metrics_of_a_request(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], GREEDY)
    [one] = output.outputs
    metrics = one.metrics
    assert one.finish_reason == "length"
    assert metrics.drafts == len(metrics.per_step) > 0
    assert sum(accepted for _, accepted in metrics.per_step) == metrics.accepted <= metrics.drafted
    assert 0 < metrics.arrival_s <= metrics.scheduled_s <= metrics.first_token_s <= metrics.finished_s


def test_a_request_without_drafts(plain: list[tuple[int, ...]], llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40, max_draft_tokens=0))
    assert (output.outputs[0].token_ids, output.outputs[0].metrics.drafted) == (plain[0], 0)


def test_outputs_as_they_grow(plain: list[tuple[int, ...]], llm: LLM) -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}

    def listen(index: int, output: RequestOutput) -> None:
        seen[index] += output.outputs[0].token_ids

    params = SamplingParams(temperature=0.0, max_tokens=40, output_kind=RequestOutputKind.DELTA)
    llm.generate(PROMPTS[:2], params, on_output=listen)
    assert [tuple(tokens) for tokens in seen.values()] == plain[:2]


def test_logprobs_stops_and_forms(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0, stop=["ry"]))
    [one] = output.outputs
    assert (one.finish_reason, one.stop_reason) == ("stop", "ry")
    assert one.logprobs is not None
    assert output.prompt_logprobs is not None
    assert all(token in position for token, position in zip(one.token_ids, one.logprobs, strict=True))
    assert [position is None for position in output.prompt_logprobs] == [True] + [False] * (
        len(output.prompt_token_ids) - 1
    )
    form = StructuredOutputsParams(choice=["yes", "no"])
    [chosen] = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, structured_outputs=form))
    assert chosen.outputs[0].text in ("yes", "no")


def test_prompts_in_every_form(llm: LLM) -> None:
    tokens = llm.tokenizer.encode(PROMPTS[0])
    for prompt in (tokens, {"prompt": PROMPTS[0]}, {"prompt_token_ids": tokens}):
        [output] = llm.generate(prompt, GREEDY)  # type: ignore[arg-type]  # a mapping of either kind
        assert list(output.prompt_token_ids) == tokens
    [output] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, truncate_prompt_tokens=2))
    assert list(output.prompt_token_ids) == tokens[-2:]


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", {}, "vLLM refuses the request"),
        ("x", {"min_p": 0.5}, "together with speculation"),
        ("x", {"prompt_logprobs": 3000}, "vLLM refuses the request"),
        ({}, {}, "the prompt is a dict"),
    ],
)
def test_requests_that_cannot_be_served(llm: LLM, prompt: Any, params: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate([PROMPTS[0], prompt], SamplingParams(**params))
    llm.verify_integrity()


def test_an_error_in_the_callback_aborts_the_rest(llm: LLM) -> None:
    def fail(index: int, output: RequestOutput) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, on_output=fail)
    llm.verify_integrity()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enforce_eagr": True}, "unknown option 'enforce_eagr' for vLLM; did you mean 'enforce_eager'"),
        ({"max_num_seqs": -1}, "vLLM refuses the configuration"),
        (
            {"speculative_config": {"model": str(MODELS / "draft"), "policy": "confidence", "drafter_backend": "vllm"}},
            "cannot stop between",
        ),
    ],
)
def test_options_that_cannot_work(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(MODELS / "target"), backend="vllm", **{**options(), **given})


def test_metrics_and_tokenizer_are_vllm_s(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], GREEDY)
    found = {metric.name: metric for metric in llm.get_metrics()}
    tokens = found["vllm:generation_tokens"]
    assert isinstance(tokens, Counter)
    assert tokens.value >= len(output.outputs[0].token_ids)
    assert isinstance(found["vllm:spec_decode_num_accepted_tokens_per_pos"], Vector)
    assert isinstance(found["vllm:num_requests_running"], Gauge)
    assert isinstance(found["vllm:e2e_request_latency_seconds"], Histogram)
    assert llm.get_tokenizer().decode(list(output.prompt_token_ids)) == PROMPTS[0]
