"""What an engine did between two snapshots, as numbers to draw. Ratios are of counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.family import HistogramCounts
from dynaspec.observe.snapshot import EngineSnapshot

from .decision import explain


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot and when it was taken, in unix seconds."""

    at: float
    snapshot: EngineSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One second of the charts. None: nothing happened that could be measured, or the policy does not say."""

    t: float
    """Unix seconds."""
    emitted_per_s: float
    accepted_per_s: float
    """Of the emitted tokens, those that a drafter wrote; the others are the target's own."""
    acceptance_length: float | None
    """Tokens emitted per draft, the target's own included."""
    acceptance_rate: float | None
    """Accepted / drafted."""
    draft_length: float | None
    """Tokens drafted per draft."""
    accepted_length: float | None
    """Drafted tokens accepted per draft."""
    step_ms: float | None
    draft_ms: float | None
    verify_ms: float | None
    busy: float
    """Share of the time in which the engine was stepping."""
    running: int
    waiting: int
    ttft_p50_ms: float | None
    """Arrival to first token, over the last minute; the others alike."""
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    """Between two outputs of a request, each of which may bring several tokens."""
    itl_p95_ms: float | None
    plain_per_s: float | None
    """Tokens/s that the controller expects of plain decoding."""
    drafting_per_s: float | None
    """The same with drafts."""
    measured_per_s: float | None
    """Tokens per second of steps that decode alone, which is what the two are to be held against."""


def point(minute: Sequence[Moment]) -> Point:
    """The point at the last moment.

    Args:
        minute: the moments of the last minute, in order; two at least.
    """
    before, now = minute[-2], minute[-1]
    snapshot, totals, seconds = now.snapshot, now.snapshot.totals, now.at - before.at
    counts = snapshot.counts - before.snapshot.counts
    emitted = totals.generation_tokens - before.snapshot.totals.generation_tokens
    then = minute[0].snapshot.totals
    ttft, itl = totals.first_token_s - then.first_token_s, totals.inter_token_s - then.inter_token_s
    decision = explain(snapshot, counts)
    return Point(
        t=round(now.at, 3),
        emitted_per_s=emitted / seconds,
        accepted_per_s=min(counts.accepted, emitted) / seconds,  # a request may have ended inside its accepted run
        acceptance_length=counts.mean_acceptance_length,
        acceptance_rate=counts.draft_acceptance_rate,
        draft_length=_per_draft(counts.draft_tokens, counts),
        accepted_length=_per_draft(counts.accepted, counts),
        step_ms=_per_step_ms(counts.step_s, counts),
        draft_ms=_per_step_ms(counts.draft_s, counts),
        verify_ms=_per_step_ms(counts.verify_s, counts),
        busy=min(1.0, counts.step_s / seconds),
        running=snapshot.running,
        waiting=snapshot.waiting,
        ttft_p50_ms=_quantile_ms(ttft, 0.5),
        ttft_p95_ms=_quantile_ms(ttft, 0.95),
        itl_p50_ms=_quantile_ms(itl, 0.5),
        itl_p95_ms=_quantile_ms(itl, 0.95),
        plain_per_s=decision.plain_per_s,
        drafting_per_s=decision.drafting_per_s,
        measured_per_s=decision.measured_per_s if counts.steps else None,
    )


def _per_draft(tokens: int, counts: SpecCounts) -> float | None:
    return tokens / counts.drafts if counts.drafts else None


def _per_step_ms(seconds: float, counts: SpecCounts) -> float | None:
    return 1e3 * seconds / counts.steps if counts.steps else None


def _quantile_ms(seconds: HistogramCounts, q: float) -> float | None:
    found = seconds.quantile(q)
    return None if found is None else 1e3 * found
