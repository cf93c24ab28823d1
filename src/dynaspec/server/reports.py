"""What answers say of their own making: usage, drafts, vLLM's ``metrics``, llama.cpp's ``timings``."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

from dynaspec.contract.outputs import RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import SamplingParams, SpeculationMetrics

from .inputs import reported_speculation
from .protocol.generation import (
    GenerationRequest,
    PerRequestMetrics,
    PromptTokensDetails,
    SpeculationReport,
    SpeculativeDecodingMetrics,
    Timings,
    Usage,
)
from .state import ServerState


class UsageCounter:
    """Sums over prompts and continuations, whether outputs come whole or in deltas.

    Args:
        outputs_count: whether output tokens are counted; not if none was asked for.
    """

    def __init__(self, *, outputs_count: bool = True) -> None:
        self._outputs_count = outputs_count
        self._prompts: dict[int, tuple[int, int]] = {}
        """(tokens, of which cached) by prompt."""
        self._completion_tokens = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        """What is new."""
        self._prompts[prompt] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if self._outputs_count:
            self._completion_tokens += sum(len(one.token_ids) for one in output.outputs)

    def total(self) -> Usage:
        """All so far."""
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        cached = sum(cached for _, cached in self._prompts.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


def report(metrics: RequestMetrics, level: SpeculationMetrics) -> SpeculationReport | None:
    """What became of a continuation's drafts; None for ``off``."""
    if level == "off":
        return None
    detailed = level == "detailed"
    return SpeculationReport(
        steps=metrics.steps,
        drafts=metrics.drafts,
        drafted=metrics.drafted,
        verified=metrics.verified,
        accepted=metrics.accepted,
        mean_acceptance_length=metrics.mean_acceptance_length,
        draft_acceptance_rate=metrics.draft_acceptance_rate,
        drafted_per_pos=metrics.drafted_per_pos if detailed else None,
        accepted_per_pos=metrics.accepted_per_pos if detailed else None,
        per_step=metrics.per_step if detailed else None,
    )


class Reports:
    """Of one request. They tell of one continuation: where there are several, there are none, as in vLLM.

    Args:
        continuations: prompts times ``n``.
    """

    def __init__(self, body: GenerationRequest, state: ServerState, *, continuations: int) -> None:
        config, speculation, asked = state.config, state.llm.config.speculative_config, reported_speculation(body)
        level = config.per_request_spec_decode_metrics if asked == "off" else asked
        one = continuations == 1
        self._times = one and config.enable_per_request_metrics
        self._drafts = one and level != "none" and speculation is not None
        self._each_step = level == "detailed"
        self._timings = one and bool(body.timings_per_token)
        self._longest = 0 if speculation is None else speculation.longest_draft
        self._prompt_tokens = 0
        self._tokens = 0
        self._latest = RequestMetrics()

    def counted(self, params: SamplingParams) -> SamplingParams:
        """Parameters with which the engine counts what is to be told."""
        return replace(params, speculation_metrics="detailed") if self._drafts else params

    def note(self, output: RequestOutput) -> None:
        """The next delta, or the only output."""
        self._prompt_tokens = len(output.prompt_token_ids)
        for completion in output.outputs:
            self._tokens += len(completion.token_ids)
            self._latest = completion.metrics

    def metrics(self) -> PerRequestMetrics | None:
        """When all has been noted; None if nobody asks."""
        if not self._times and not self._drafts:
            return None
        told = self._latest
        metrics = PerRequestMetrics()
        if self._times and told.first_token_s:
            generating, later = told.finished_s - told.first_token_s, self._tokens - 1
            metrics = PerRequestMetrics(
                time_to_first_token_ms=1e3 * (told.first_token_s - told.scheduled_s),
                generation_time_ms=1e3 * generating,
                queue_time_ms=1e3 * (told.scheduled_s - told.arrival_s),
                mean_itl_ms=1e3 * generating / later if later else None,
                tokens_per_second=_ratio(self._tokens, told.finished_s - told.scheduled_s),
            )
        if self._drafts:
            metrics.speculative_decoding = self._speculation(told)
        return metrics

    def timings(self) -> Timings | None:
        """Up to now; None if nobody asks, or there is no token yet."""
        told = self._latest
        if not self._timings or not told.first_token_s:
            return None
        prompt_n = self._prompt_tokens - told.cached_tokens
        prompt_ms = 1e3 * (told.first_token_s - told.scheduled_s)
        predicted_ms = 1e3 * ((told.finished_s or time.monotonic()) - told.first_token_s)
        return Timings(
            cache_n=told.cached_tokens,
            prompt_n=prompt_n,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=_ratio(prompt_ms, prompt_n),
            prompt_per_second=_ratio(1e3 * prompt_n, prompt_ms),
            predicted_n=self._tokens,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=_ratio(predicted_ms, self._tokens),
            predicted_per_second=_ratio(1e3 * self._tokens, predicted_ms),
            draft_n=told.drafted or None,
            draft_n_accepted=told.accepted if told.drafted else None,
        )

    def _speculation(self, told: RequestMetrics) -> SpeculativeDecodingMetrics:
        steps = [(drafted, accepted) for drafted, accepted in told.per_step if drafted]
        counts = Counter(accepted for _, accepted in steps)
        return SpeculativeDecodingMetrics(
            mean_acceptance_length=1 + _ratio(told.accepted, len(steps)),
            draft_acceptance_rate=_ratio(told.accepted, told.drafted),
            acceptance_histogram=[counts[accepted] for accepted in range(self._longest + 1)],
            num_spec_steps=len(steps),
            num_accepted_draft_tokens=told.accepted,
            num_draft_tokens=told.drafted,
            num_spec_tokens=self._longest,
            per_step_accepted=[accepted for _, accepted in steps] if self._each_step else None,
            per_step_drafted=[drafted for drafted, _ in steps] if self._each_step else None,
        )


def _ratio(part: float, whole: float) -> float:
    """0 where there is nothing to divide by."""
    return part / whole if whole else 0.0
