"""From records of requests to throughput, percentiles and goodput."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .load import Load
from .records import Failure, Record
from .settings import Reported


@dataclass(frozen=True, slots=True)
class Spread:
    """Times of many requests, in milliseconds. All None where there are none."""

    mean: float | None
    median: float | None
    std: float | None
    percentiles: Mapping[float, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
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


def measure(load: Load, reported: Reported) -> Measured:
    """Everything that is reported of a load."""
    done = [record for record in load.records if record.failure is None]
    goals = reported.goals_ms
    return Measured(
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


def peak_requests(records: Sequence[Record]) -> int:
    """Most requests under way at once; one that ends as another starts does not overlap it."""
    changes = [(record.start_s, 1) for record in records] + [(record.end_s, -1) for record in records]
    peak = current = 0
    for _, change in sorted(changes):
        current += change
        peak = max(peak, current)
    return peak


def peak_tokens(records: Sequence[Record]) -> float:
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


def _is_good(record: Record, goals_ms: Mapping[str, float]) -> bool:
    """A request of fewer than two tokens takes no time per token."""
    times = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(1e3 * times[name] <= limit for name, limit in goals_ms.items())


_TIMES: Mapping[str, Callable[[Sequence[Record]], Iterable[float]]] = {
    "ttft": lambda records: [record.ttft_s for record in records],
    "tpot": lambda records: [tpot for record in records if (tpot := record.tpot_s) is not None],
    "itl": lambda records: [gap for record in records for gap in record.itl_s],
    "e2el": lambda records: [record.e2el_s for record in records],
    "client_queue_time": lambda records: [record.queued_s for record in records],
    "e2el_including_client_queue": lambda records: [record.e2el_s + record.queued_s for record in records],
}
