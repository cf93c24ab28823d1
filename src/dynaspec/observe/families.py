"""Metric families: name, type, labels, meaning, and how values come from what was counted; those of an engine; and what
they say now, as Python objects.

Names, labels and meaning are vLLM's where vLLM has the metric, and the objects are those of its ``LLM.get_metrics``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from .counts import DRAFT_TOKENS, HistogramCounts, SpecCounts
from .estimates import MODES, read_estimates
from .stats import EngineSnapshot

_TOTAL = "_total"
"""Ends the names of counters where Prometheus reads them, but not here."""
_POSITION = "position"
S = TypeVar("S")
Values = Sequence[tuple[tuple[str, ...], float]]
"""Values of a family's labels, and what was counted for them."""


@dataclass(frozen=True, slots=True)
class NumberFamily(Generic[S]):
    """Counters or gauges, read off a source of type ``S``.

    Args:
        name: without namespace; a counter's ends in ``_total``.
        labels: beside those that all families have.
    """

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    labels: tuple[str, ...]
    values: Callable[[S], Values]


@dataclass(frozen=True, slots=True)
class HistogramFamily(Generic[S]):
    """A histogram, read off a source of type ``S``."""

    name: str
    meaning: str
    value: Callable[[S], HistogramCounts]


Family: TypeAlias = NumberFamily[S] | HistogramFamily[S]


def bound_text(bound: float) -> str:
    """A bucket's upper bound as Prometheus writes it."""
    return "+Inf" if bound == math.inf else str(float(bound))


def counter(name: str, meaning: str, value: Callable[[S], float]) -> NumberFamily[S]:
    return NumberFamily(name, "counter", meaning, (), lambda source: [((), value(source))])


def gauge(name: str, meaning: str, value: Callable[[S], float | None]) -> NumberFamily[S]:
    """Says nothing where the value is None."""

    def values(source: S) -> Values:
        found = value(source)
        return [] if found is None else [((), found)]

    return NumberFamily(name, "gauge", meaning, (), values)


def counters(name: str, label: str, meaning: str, values: Callable[[S], Mapping[str, float]]) -> NumberFamily[S]:
    """One for each value of a label."""
    return NumberFamily(name, "counter", meaning, (label,), lambda source: _one_label(values(source)))


def gauges(name: str, label: str, meaning: str, values: Callable[[S], Mapping[str, float]]) -> NumberFamily[S]:
    """One for each value of a label."""
    return NumberFamily(name, "gauge", meaning, (label,), lambda source: _one_label(values(source)))


def _one_label(values: Mapping[str, float]) -> Values:
    return [((key,), value) for key, value in values.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric with one set of labels."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """Only grows; whole numbers but for those of seconds."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """Goes up and down."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """A counter for each position of a draft."""

    values: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """How values are distributed."""

    count: int
    sum: float
    buckets: Mapping[str, int]
    """Upper bound → values up to it; ``+Inf`` has all."""


def readings(
    families: Sequence[Family[S]], source: S, *, namespace: str, labels: Mapping[str, str]
) -> Iterator[Metric]:
    """What the families say of a source now.

    Args:
        namespace: comes before every name, with a colon.
        labels: go with every metric.
    """
    for family in families:
        name = f"{namespace}:{family.name}"
        if isinstance(family, HistogramFamily):
            value = family.value(source)
            buckets = {bound_text(bound): count for bound, count in value.cumulative()}
            yield Histogram(name=name, labels=labels, count=value.count, sum=value.total, buckets=buckets)
            continue
        counts, name = family.kind == "counter", name.removesuffix(_TOTAL)
        if family.labels == (_POSITION,):
            yield Vector(name=name, labels=labels, values=[int(number) for _, number in family.values(source)])
            continue
        for own, number in family.values(source):
            told = {**labels, **dict(zip(family.labels, own, strict=True))}
            yield (
                Counter(name=name, labels=told, value=number) if counts else Gauge(name=name, labels=told, value=number)
            )


Families = tuple[Family[EngineSnapshot], ...]

SKIP_REASONS = (
    *("policy", "requested_off", "no_room", "no_rows", "no_blocks"),
    *("catching_up", "drafter_length", "between_characters", "no_match", "proposer_fault", "other"),
)
FAULTS = ("raised", "nonsense", "overrun", "other")
HEALTH: tuple[Family[bool], ...] = (
    gauge("engine_up", "1 while the engine runs; 0 once it has stopped, and then there is nothing else of it.", float),
)


def draft_lengths(counts: SpecCounts) -> HistogramCounts:
    """Request-steps by the number of tokens drafted, 0 where there was none."""
    reach = (counts.request_steps, *counts.drafted_per_pos, 0)
    up_to = [reach[0] - reach[min(bound + 1, len(reach) - 1)] for bound in DRAFT_TOKENS]
    per_bucket = [b - a for a, b in zip((0, *up_to), (*up_to, reach[0]), strict=True)]
    return HistogramCounts(DRAFT_TOKENS, tuple(per_bucket), float(counts.draft_tokens))


def _by_position(per_position: tuple[int, ...], longest: int) -> Mapping[str, float]:
    """Every position that there may be, so that a counter is there before it counts."""
    padded = (*per_position, *(0,) * (longest - len(per_position)))
    return {str(position): count for position, count in enumerate(padded)}


def _bounded(counts: Mapping[str, int], known: Sequence[str]) -> Mapping[str, float]:
    """Every known key; what is counted under others is ``other``."""
    found = dict.fromkeys(known, 0.0)
    for key, count in counts.items():
        found[key if key in found else "other"] += count
    return found


def _guard_state(snapshot: EngineSnapshot) -> Mapping[str, float]:
    mode = read_estimates(snapshot.estimates).mode
    return {} if mode is None else {state: float(state == mode) for state in MODES}


LOAD: Families = (
    gauge("num_requests_running", "Requests that are scheduled, decoding or in prefill.", lambda s: s.running),
    gauge("num_requests_waiting", "Requests in the engine's queue.", lambda s: s.waiting),
    gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 … 1.", lambda s: s.kv_blocks_used / s.kv_blocks),
    counter("num_preemptions_total", "Requests that lost their KV and waited again.", lambda s: s.counts.preemptions),
    counter("prefix_cache_queries_total", "Tokens looked up in the prefix cache.", lambda s: s.prefix_cache_queries),
    counter("prefix_cache_hits_total", "Tokens found in the prefix cache.", lambda s: s.prefix_cache_hits),
)
REQUESTS: Families = (
    counter(
        "prompt_tokens_total", "Prompt tokens of requests that got a first token.", lambda s: s.totals.prompt_tokens
    ),
    counter("generation_tokens_total", "Tokens generated.", lambda s: s.totals.generation_tokens),
    counters(
        "request_success_total",
        "finished_reason",
        "Requests that ended, by reason; aborted ones too.",
        lambda s: {str(reason): count for reason, count in s.totals.finished.items()},
    ),
    HistogramFamily(
        "time_to_first_token_seconds", "Time from arrival to first token.", lambda s: s.totals.first_token_s
    ),
    HistogramFamily(
        "inter_token_latency_seconds",
        "Time between two outputs of a request; each brings one token, or several with accepted drafts.",
        lambda s: s.totals.inter_token_s,
    ),
    HistogramFamily(
        "request_time_per_output_token_seconds",
        "Time from first to last token by the tokens after the first; once for each ended request.",
        lambda s: s.totals.per_output_token_s,
    ),
    HistogramFamily("e2e_request_latency_seconds", "Time from arrival to end.", lambda s: s.totals.e2e_s),
    HistogramFamily(
        "request_queue_time_seconds", "Time from arrival to being scheduled first.", lambda s: s.totals.queue_s
    ),
    HistogramFamily(
        "request_prefill_time_seconds", "Time from being scheduled first to first token.", lambda s: s.totals.prefill_s
    ),
    HistogramFamily("request_decode_time_seconds", "Time from first to last token.", lambda s: s.totals.decode_s),
    HistogramFamily(
        "request_inference_time_seconds", "Time from being scheduled first to end.", lambda s: s.totals.inference_s
    ),
    HistogramFamily("request_prompt_tokens", "Prompt tokens of ended requests.", lambda s: s.totals.prompt_length),
    HistogramFamily("request_generation_tokens", "Output tokens of ended requests.", lambda s: s.totals.output_length),
)
STEPS: Families = (
    HistogramFamily(
        "iteration_tokens_total",
        "Tokens of a step: prompt tokens computed, and tokens emitted by decoding requests.",
        lambda s: s.steps.tokens,
    ),
    HistogramFamily("step_time_seconds", "Time of a step.", lambda s: s.steps.step_s),
    HistogramFamily("batch_size", "Decoding requests of a step that has any.", lambda s: s.steps.batch_size),
    counter("step_seconds_total", "Time spent in steps.", lambda s: s.counts.step_s),
    counter("draft_seconds_total", "Time spent drafting; part of the steps'.", lambda s: s.counts.draft_s),
    counter(
        "verify_seconds_total",
        "Time spent verifying: the target's passes and acceptance; part of the steps'.",
        lambda s: s.counts.verify_s,
    ),
    counter("target_passes_total", "Passes of the target model.", lambda s: s.counts.target_passes),
    counter("drafter_passes_total", "Passes of draft models.", lambda s: s.counts.drafter_passes),
    counter("prefill_rows_total", "Prompt tokens computed; recomputed ones too.", lambda s: s.counts.prefill_rows),
)
SPECULATION: Families = (
    counter(
        "spec_decode_num_drafts_total",
        "Drafts: a request in a step with at least one drafted token.",
        lambda s: s.counts.drafts,
    ),
    counter("spec_decode_num_draft_tokens_total", "Tokens drafted.", lambda s: s.counts.draft_tokens),
    counter(
        "spec_decode_num_verified_tokens_total", "Drafted tokens that the target tested.", lambda s: s.counts.verified
    ),
    counter("spec_decode_num_accepted_tokens_total", "Drafted tokens accepted.", lambda s: s.counts.accepted),
    counters(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "position",
        "Drafts whose token at this position was accepted.",
        lambda s: _by_position(s.counts.accepted_per_pos, s.longest_draft),
    ),
    counters(
        "spec_decode_num_draft_tokens_per_pos_total",
        "position",
        "Drafts that have a token at this position.",
        lambda s: _by_position(s.counts.drafted_per_pos, s.longest_draft),
    ),
    HistogramFamily(
        "draft_length", "Tokens drafted for a request in a step; 0 = plain decoding.", lambda s: draft_lengths(s.counts)
    ),
    counter("request_steps_total", "Decoding requests, summed over steps.", lambda s: s.counts.request_steps),
    counter("decode_tokens_total", "Tokens emitted by decoding requests.", lambda s: s.counts.emitted),
    counter("dsl_num_proposals_total", "Drafts asked for.", lambda s: s.counts.proposals),
    counter(
        "dsl_num_early_exits_total",
        "Drafts that a stop rule ended before the length asked for.",
        lambda s: s.counts.early_exits,
    ),
    counter("dsl_tokens_requested_total", "Draft tokens asked for.", lambda s: s.counts.tokens_requested),
    counter("dsl_tokens_generated_total", "Draft tokens made.", lambda s: s.counts.draft_tokens),
    counter("drafter_kv_skipped_total", "Draft tokens whose drafter KV was not kept.", lambda s: s.counts.kv_skipped),
    counter("drafter_kv_redone_total", "Tokens that the drafter had to process again.", lambda s: s.counts.kv_redone),
    counters(
        "skipped_drafts_total",
        "reason",
        "Drafts that came to nothing or were cut short, by reason.",
        lambda s: _bounded(s.counts.skipped, SKIP_REASONS),
    ),
)
CONTROL: Families = (
    gauges("engine_info", "policy", "1; its label says which policy decides.", lambda s: {s.policy: 1.0}),
    gauge(
        "goodput_predicted",
        "Tokens a second that the policy expects of its latest plan; only while requests run.",
        lambda s: read_estimates(s.estimates).expected_goodput if s.running else None,
    ),
    gauge(
        "goodput_measured",
        "Tokens a second of the latest steps without prefill, about 64 of them; only while requests run.",
        lambda s: s.steps.recent_goodput if s.running else None,
    ),
    gauges("guard_state", "state", "1 for the policy's mode of the latest step, 0 for the others.", _guard_state),
    gauges(
        "proposer_enabled",
        "proposer",
        "1 while the proposer may draft, 0 once its faults have switched it off.",
        lambda s: s.proposers,
    ),
    gauge(
        "suffix_cache_answers",
        "Answers that suffix decoding drafts from, running requests' among them.",
        lambda s: None if s.kept_text is None else s.kept_text.answers,
    ),
    gauge(
        "suffix_cache_tokens",
        "Tokens of these answers.",
        lambda s: None if s.kept_text is None else s.kept_text.tokens,
    ),
    gauge(
        "suffix_cache_bytes",
        "Memory of all suffix trees, those of running requests' own texts included.",
        lambda s: None if s.kept_text is None else s.kept_text.bytes,
    ),
    counters(
        "proposer_faults_total",
        "kind",
        "Times that a proposer raised, returned nonsense, or took far too long again and again (overrun).",
        lambda s: _bounded(s.counts.faults, FAULTS),
    ),
)
ENGINE_FAMILIES: Families = (*LOAD, *REQUESTS, *STEPS, *SPECULATION, *CONTROL)
