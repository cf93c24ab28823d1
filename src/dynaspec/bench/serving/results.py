"""What a load test measured: the load that was put on, times, throughput, and speculation by the server's word."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from dynaspec.observe.counts import SpecCounts

from .client import Failure, RequestRecord
from .server import Reported

NAMESPACES = ("dynaspec", "vllm")
"""Prefixes of metrics' names, in order of preference."""
_NAMES: Mapping[str, str] = {
    "spec_decode_num_drafts_total": "drafts",
    "spec_decode_num_draft_tokens_total": "draft_tokens",
    "spec_decode_num_accepted_tokens_total": "accepted",
}
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a load."""

    records: tuple[RequestRecord, ...]
    """In the order of the requests."""
    duration_s: float
    """From the start to the end of the last answer."""
    client_cpu_s: float
    """Processor time of this process meanwhile."""
    send_lag_s: float
    """By how much the latest of the requests was late, other than for the limit of concurrency."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Times of many requests, in milliseconds. All None where there are none."""

    mean: float | None
    median: float | None
    std: float | None
    percentiles: Mapping[float, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """A load test's figures; those of times and tokens are of the requests that succeeded."""

    duration_s: float
    completed: int
    failures: tuple[Failure, ...]
    input_tokens: int
    cached_tokens: int
    """Of the prompts', those that the server had in its prefix cache."""
    output_tokens: int
    good: int | None
    """Requests that met every goal; None without goals."""
    spreads: Mapping[str, Spread]
    """Name of a time → its spread."""
    peak_requests: int
    """Most requests under way at once."""
    peak_tokens_per_s: float
    """Output tokens of the best second."""

    def per_second(self, count: float) -> float:
        return count / self.duration_s

    @property
    def failure_kinds(self) -> list[tuple[Failure, int]]:
        """A failure of every kind, and how many there were, most frequent first."""
        counts = Counter(failure.kind for failure in self.failures)
        first = {failure.kind: failure for failure in reversed(self.failures)}
        return [(first[kind], count) for kind, count in counts.most_common()]


def measure(load: Load, reported: Reported) -> LoadFigures:
    """Everything that is reported of a load."""
    done = [record for record in load.records if record.failure is None]
    goals = reported.goals_ms
    return LoadFigures(
        duration_s=load.duration_s,
        completed=len(done),
        failures=tuple(record.failure for record in load.records if record.failure is not None),
        input_tokens=sum(record.prompt_tokens for record in done),
        cached_tokens=sum(record.usage.cached_tokens for record in done if record.usage is not None),
        output_tokens=sum(record.output_tokens for record in done),
        good=sum(_is_good(record, goals) for record in done) if goals else None,
        spreads={name: spread(_TIMES[name](done), reported.percentiles) for name in reported.metrics},
        peak_requests=peak_requests(done),
        peak_tokens_per_s=peak_tokens(done),
    )


def spread(seconds: Iterable[float], percentiles: Sequence[float]) -> Spread:
    """Mean, median, standard deviation and percentiles (linear between two values), in milliseconds."""
    values = 1e3 * np.fromiter(seconds, dtype=np.float64)
    if not values.size:
        return Spread(None, None, None, dict.fromkeys(percentiles))
    found = np.percentile(values, percentiles)
    return Spread(
        mean=float(values.mean()),
        median=float(np.median(values)),
        std=float(values.std()),
        percentiles={p: float(value) for p, value in zip(percentiles, found, strict=True)},
    )


def peak_requests(records: Sequence[RequestRecord]) -> int:
    """Most requests under way at once; one that ends as another starts does not overlap it."""
    changes = [(record.start_s, 1) for record in records] + [(record.end_s, -1) for record in records]
    peak = current = 0
    for _, change in sorted(changes):
        current += change
        peak = max(peak, current)
    return peak


def peak_tokens(records: Sequence[RequestRecord]) -> float:
    """Most output tokens in a second, counted in whole seconds from the first request on.

    A request's tokens are spread evenly over its chunks: a stream does not say how many each of them brought.
    """
    if not records:
        return 0.0
    start = min(record.start_s for record in records)
    seconds = np.zeros(math.floor(max(record.end_s for record in records) - start) + 1)
    for record in records:
        for moment in record.chunks_s:
            seconds[math.floor(moment - start)] += record.output_tokens / len(record.chunks_s)
    return float(seconds.max())


def _is_good(record: RequestRecord, goals_ms: Mapping[str, float]) -> bool:
    """A request of fewer than two tokens takes no time per token."""
    times = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(1e3 * times[name] <= limit for name, limit in goals_ms.items())


_TIMES: Mapping[str, Callable[[Sequence[RequestRecord]], Iterable[float]]] = {
    "ttft": lambda records: [record.ttft_s for record in records],
    "tpot": lambda records: [tpot for record in records if (tpot := record.tpot_s) is not None],
    "itl": lambda records: [gap for record in records for gap in record.itl_s],
    "e2el": lambda records: [record.e2el_s for record in records],
    "client_queue_time": lambda records: [record.queued_s for record in records],
    "e2el_including_client_queue": lambda records: [record.e2el_s + record.queued_s for record in records],
}


@dataclass(frozen=True, slots=True)
class DraftTotals:
    """Sums over requests."""

    requests: int = 0
    """Those whose answers said anything of drafts."""
    steps: int = 0
    """Target passes that gave tokens, but for those that completed a prompt."""
    drafts: int = 0
    """Steps with a draft."""
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None without any."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of a request in a target pass, with and without a draft; None without any."""
        return 1 + self.accepted / self.steps if self.steps else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "steps": self.steps,
            "drafts": self.drafts,
            "draft_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_step": self.tokens_per_step,
        }


def total_drafts(records: Sequence[RequestRecord]) -> DraftTotals:
    """Sums over the requests that succeeded and said something."""
    told = [r.speculation for r in records if r.failure is None and r.speculation is not None]
    totals = {key: sum(_count(one, key) for one in told) for key in ("steps", "drafts", "drafted", "accepted")}
    return DraftTotals(len(told), **totals)


def drafts_by_category(records: Sequence[RequestRecord], categories: Sequence[str]) -> dict[str, DraftTotals]:
    """Category of prompts → sums; of categories in which something was said."""
    groups: dict[str, list[RequestRecord]] = defaultdict(list)
    for record, category in zip(records, categories, strict=True):
        groups[category or "all"].append(record)
    totals = {category: total_drafts(group) for category, group in sorted(groups.items())}
    return {category: drafts for category, drafts in totals.items() if drafts.requests}


def _count(speculation: Mapping[str, Any], key: str) -> int:
    value = speculation.get(key)
    return value if isinstance(value, int) else 0


def read_counters(text: str) -> SpecCounts | None:
    """The counters in a page of Prometheus's text format, over all engines of a server; None if it has none, or is of
    another format."""
    totals: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    positions: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        return None
    for sample in samples:
        namespace, _, name = sample.name.partition(":")
        if name in _NAMES:
            totals[namespace][_NAMES[name]] += int(sample.value)
        elif name == _PER_POSITION and sample.labels.get("position", "").isdigit():
            positions[namespace][int(sample.labels["position"])] += int(sample.value)
    for namespace in NAMESPACES:
        if namespace in totals:
            found, accepted = totals[namespace], positions[namespace]
            return SpecCounts(
                drafts=found["drafts"],
                draft_tokens=found["draft_tokens"],
                accepted=found["accepted"],
                draft_emitted=found["drafts"] + found["accepted"],
                accepted_per_pos=tuple(accepted[position] for position in range(max(accepted, default=-1) + 1)),
            )
    return None
