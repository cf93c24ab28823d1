"""One request that vLLM runs: its outputs so far, as dynaspec's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynaspec.contract.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams

from .llm_outputs import completion, prompt_logprobs, with_drafts


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
