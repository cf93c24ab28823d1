"""vLLM's outputs as dynaspec's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynaspec.contract.outputs import CompletionOutput, Logprob, RequestMetrics
from dynaspec.contract.sampling_params import SpeculationMetrics


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
