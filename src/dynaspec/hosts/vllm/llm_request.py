"""Requests of ``LLM`` on vLLM: parameters as vLLM's, and its outputs as dynaspec's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dynaspec.contract.errors import RequestError
from dynaspec.contract.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams, SpeculationMetrics

from .settings import KEY

SAME = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "max_tokens", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "seed", "logprobs", "prompt_logprobs", "detokenize"),
    "skip_special_tokens",
)
"""Parameters with vLLM's names and meaning."""
OURS = ("truncate_prompt_tokens", "speculation_metrics")
"""Parameters that are carried out here, before and after vLLM."""
TRANSLATED = ("structured_outputs", "output_kind", "max_draft_tokens")
REFUSED: Mapping[str, str] = {
    "expected_acceptance": "vLLM's requests have no place for it",
}
"""Parameters that do not hold under vLLM, and why."""

_NO_SEED = -1
"""vLLM's word for None."""
_NOT_WHILE_SPECULATING = {"min_p": 0.0, "logit_bias": None}
"""Parameters that vLLM does not have together with speculation, and values that ask for nothing."""


def vllm_params(params: SamplingParams, *, speculates: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``SamplingParams``; those of enumerations and of structured outputs by their values.

    Args:
        speculates: whether vLLM drafts at all.

    Raises:
        RequestError: a parameter that vLLM cannot honour.
    """
    for name, why in REFUSED.items():
        if getattr(params, name) is not None:
            raise RequestError(f"{name} is {getattr(params, name)!r}; expected None, as {why}")
    if params.seed == _NO_SEED:
        raise RequestError("seed is -1, which means none to vLLM; expected another number")
    for name, nothing in _NOT_WHILE_SPECULATING.items() if speculates else ():
        if getattr(params, name) not in (nothing, {}):
            raise RequestError(
                f"{name} is {getattr(params, name)!r}; expected {nothing!r}, as vLLM does not have it together with "
                "speculation"
            )
    values = {name: _plain(getattr(params, name)) for name in SAME}
    values["output_kind"] = params.output_kind.name
    if params.structured_outputs is not None:
        form = asdict(params.structured_outputs)
        values["structured_outputs"] = {name: _plain(value) for name, value in form.items() if value is not None}
    if params.max_draft_tokens is not None:
        values["extra_args"] = {KEY: {"num_speculative_tokens": params.max_draft_tokens}}
    return values


def _plain(value: Any) -> Any:
    """Lists and dictionaries, as vLLM sends parameters to another process."""
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def completion(given: Any, metrics: RequestMetrics) -> CompletionOutput:
    """
    Args:
        given: vLLM's ``CompletionOutput``.
    """
    return CompletionOutput(
        index=given.index,
        text=given.text,
        token_ids=tuple(given.token_ids),
        cumulative_logprob=given.cumulative_logprob,
        logprobs=None if given.logprobs is None else tuple(_position(entry) for entry in given.logprobs),
        finish_reason=given.finish_reason,
        stop_reason=given.stop_reason,
        metrics=metrics,
    )


def prompt_logprobs(
    given: Iterable[Mapping[int, Any] | None] | None,
) -> tuple[Mapping[int, Logprob] | None, ...] | None:
    if given is None:
        return None
    return tuple(None if entry is None else _position(entry) for entry in given)


def _position(entry: Mapping[int, Any]) -> Mapping[int, Logprob]:
    return {token: Logprob(one.logprob, one.rank, one.decoded_token) for token, one in entry.items()}


def with_drafts(timing: RequestMetrics, counted: Any, tokens: int, level: SpeculationMetrics) -> RequestMetrics:
    """``timing`` and what vLLM has counted of a request's drafts. What it drafted and did not verify is not known.

    Args:
        counted: vLLM's ``RequestSpecDecodeMetrics``; None = nothing, as while a request runs.
        tokens: output tokens so far.
    """
    if counted is None or level == "off":
        return timing
    drafts = sum(counted.histogram)
    accepted = sum(length * times for length, times in enumerate(counted.histogram))
    totals = replace(
        timing,
        steps=max(drafts, tokens - 1 - accepted),
        drafts=drafts,
        drafted=counted.num_draft_tokens,
        verified=counted.num_draft_tokens,
        accepted=accepted,
        draft_emitted=accepted + drafts,
    )
    if level == "summary":
        return totals
    steps = tuple(zip(counted.per_step_drafted, counted.per_step_accepted, strict=True))
    drafted = _per_position([length for length, _ in steps])
    reached = _per_position([length for _, length in steps])
    return replace(
        totals,
        drafted_per_pos=drafted,
        accepted_per_pos=reached + (0,) * (len(drafted) - len(reached)),
        per_step=steps,
    )


def _per_position(lengths: Sequence[int]) -> tuple[int, ...]:
    """How many of them have a token at each position."""
    return tuple(sum(length > position for length in lengths) for position in range(max(lengths, default=0)))


class LiveRequest:
    """Puts together what vLLM hands out piece by piece: every output has all continuations."""

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self._id = request_id
        self._params = params
        self._delta = params.output_kind is RequestOutputKind.DELTA
        self._arrival_s = time.monotonic()
        self._outputs = {i: CompletionOutput(i, "", ()) for i in range(params.n)}
        self._tokens = dict.fromkeys(self._outputs, 0)
        self._of_prompt: tuple[Mapping[int, Logprob] | None, ...] | None = None
        self._latest: RequestOutput | None = None

    def take(self, given: Any) -> RequestOutput:
        """
        Args:
            given: vLLM's ``RequestOutput``.
        """
        timing = self._timing(given)
        for one in given.outputs:
            self._tokens[one.index] = len(one.token_ids) + (self._tokens[one.index] if self._delta else 0)
            drafts = one.spec_decode_metrics
            metrics = with_drafts(timing, drafts, self._tokens[one.index], self._params.speculation_metrics)
            self._outputs[one.index] = completion(one, metrics)
        if given.prompt_logprobs:  # of deltas, the first alone has them
            self._of_prompt = prompt_logprobs(given.prompt_logprobs)
        self._latest = RequestOutput(
            request_id=self._id,
            prompt=given.prompt,
            prompt_token_ids=tuple(given.prompt_token_ids or ()),
            outputs=tuple(self._outputs.values()),
            finished=given.finished,
            prompt_logprobs=self._of_prompt,
            num_cached_tokens=given.num_cached_tokens or 0,
        )
        if self._delta:
            self._outputs = {i: _nothing_new(output) for i, output in self._outputs.items()}
        return self._latest

    def aborted(self) -> RequestOutput:
        """The last output of a request that has been given up."""
        ended = tuple(
            output if output.finish_reason is not None else replace(output, finish_reason="abort")
            for output in self._outputs.values()
        )
        latest = self._latest or RequestOutput(self._id, None, (), ended, finished=True)
        return replace(latest, outputs=ended, finished=True)

    def _timing(self, given: Any) -> RequestMetrics:
        told = given.metrics
        timing = RequestMetrics(arrival_s=self._arrival_s, cached_tokens=given.num_cached_tokens or 0)
        if told is None:  # vLLM was told to keep none
            return timing
        return replace(
            timing,
            scheduled_s=told.scheduled_ts,
            first_token_s=told.first_token_ts,
            finished_s=told.last_token_ts if given.finished else 0.0,
            preemptions=told.num_preemptions,
        )


def _nothing_new(output: CompletionOutput) -> CompletionOutput:
    return replace(output, text="", token_ids=(), logprobs=None if output.logprobs is None else ())
