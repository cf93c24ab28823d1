"""What a span says of a request, named as OpenTelemetry names it for generative models where it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynaspec.contract.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams

Value = str | int | float | bool | Sequence[str]


def request_attributes(params: SamplingParams) -> Mapping[str, Value]:
    """Settings of a request, defaults left out where they mean nothing; no text that the client has sent."""
    optional: dict[str, Value | None] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "dynaspec.request.max_draft_tokens": params.max_draft_tokens,
    }
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.stream": params.output_kind is not RequestOutputKind.FINAL_ONLY,
        **{name: value for name, value in optional.items() if value is not None},
    }


class OutputTally:
    """Adds up a request's outputs, whole or in deltas."""

    def __init__(self, params: SamplingParams) -> None:
        self._delta = params.output_kind is RequestOutputKind.DELTA
        self._tokens: dict[int, int] = {}
        """Output tokens by continuation."""
        self._last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        for one in output.outputs:
            before = self._tokens.get(one.index, 0) if self._delta else 0
            self._tokens[one.index] = before + len(one.token_ids)
        self._last = output

    def attributes(self) -> Mapping[str, Value]:
        """What came of the request; nothing if there was no output."""
        last = self._last
        if last is None:
            return {}
        return {
            "gen_ai.usage.input_tokens": len(last.prompt_token_ids),
            "gen_ai.usage.cache_read.input_tokens": last.num_cached_tokens,
            "gen_ai.usage.output_tokens": sum(self._tokens.values()),
            "gen_ai.response.finish_reasons": [one.finish_reason or "abort" for one in last.outputs],
            **_latency(last.outputs),
            **_speculation([one.metrics for one in last.outputs]),
        }


def _latency(outputs: Sequence[CompletionOutput]) -> Mapping[str, Value]:
    """Seconds from arrival; the first continuation's first token and the last one's end."""
    times = [one.metrics for one in outputs]
    first = [m.first_token_s - m.arrival_s for m in times if m.first_token_s]
    queued = [m.scheduled_s - m.arrival_s for m in times if m.scheduled_s]
    ended = [m.finished_s - m.arrival_s for m in times if m.finished_s]
    found = {
        "gen_ai.latency.time_in_queue": min(queued, default=None),
        "gen_ai.latency.time_to_first_token": min(first, default=None),
        "gen_ai.latency.e2e": max(ended) if len(ended) == len(times) else None,
    }
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def _speculation(metrics: Sequence[RequestMetrics]) -> Mapping[str, Value]:
    drafts = sum(m.drafts for m in metrics)
    drafted = sum(m.drafted for m in metrics)
    accepted = sum(m.accepted for m in metrics)
    counts: dict[str, Value] = {
        "dynaspec.steps": sum(m.steps for m in metrics),
        "dynaspec.preemptions": sum(m.preemptions for m in metrics),
        "dynaspec.drafts": drafts,
        "dynaspec.drafted_tokens": drafted,
        "dynaspec.accepted_tokens": accepted,
    }
    if drafts:
        counts["dynaspec.mean_acceptance_length"] = sum(m.draft_emitted for m in metrics) / drafts
    if drafted:
        counts["dynaspec.draft_acceptance_rate"] = accepted / drafted
    return counts
