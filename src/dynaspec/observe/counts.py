"""What speculation did, in counts and seconds, and how values are distributed; ratios are computed when they are shown.

Buckets have fixed bounds, so that those of several servers can be added up. Counting a value is cheap enough to do it
for every token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate, zip_longest
from typing import Any

STEP_S = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
"""Seconds of a step, and between two outputs of a request."""
WAIT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""Seconds of a part of a request's life, or of all of it."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Tokens of a prompt or an output."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""Requests or tokens of a step."""
DRAFT_TOKENS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64)
"""Tokens of a draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCounts:
    """Totals over any span of steps. ``a + b`` joins two spans; ``later - earlier`` is what happened between.

    A *request-step* is one decoding request in one step; a *draft* is a request-step with at least one
    drafted token.
    """

    steps: int = 0
    """Outcomes recorded."""
    request_steps: int = 0
    target_passes: int = 0
    drafter_passes: int = 0
    prefill_rows: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    verified: int = 0
    """Drafted tokens that the target tested."""
    accepted: int = 0
    emitted: int = 0
    """Tokens committed, with and without drafts."""
    draft_emitted: int = 0
    """Of these, tokens of request-steps with a draft."""
    drafted_per_pos: tuple[int, ...] = ()
    """Drafts that have a token at each position, from 0."""
    accepted_per_pos: tuple[int, ...] = ()
    """Drafts whose token at each position was accepted."""
    proposals: int = 0
    """Request-steps for which a draft was asked for."""
    early_exits: int = 0
    """Proposals that a stop rule ended before the length asked for."""
    tokens_requested: int = 0
    """Σ lengths asked for."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    step_s: float = 0.0
    kv_skipped: int = 0
    """Draft tokens whose drafter KV was not kept."""
    kv_redone: int = 0
    """Committed tokens that the drafter processed again, because the first time left no usable KV."""
    proposer_faults: int = 0
    """Of every kind: see ``faults``."""
    preemptions: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Drafts that came to nothing, by reason."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """What proposers did wrong: they raised, returned nonsense, or took far too long (``overrun``)."""

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens emitted per draft, the target's own included: 1 … k + 1; None without drafts."""
        return _ratio(self.draft_emitted, self.drafts)

    @property
    def tokens_per_request_step(self) -> float | None:
        """Tokens emitted per decoding request and step, plain steps included; None without any."""
        return _ratio(self.emitted, self.request_steps)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted; None without drafts."""
        return _ratio(self.accepted, self.draft_tokens)

    @property
    def rate_per_position(self) -> tuple[float, ...]:
        """Share of all drafts whose token at each position was accepted: unconditional, non-increasing."""
        return tuple(count / self.drafts for count in self.accepted_per_pos)

    def __add__(self, other: SpecCounts) -> SpecCounts:
        return self._combine(other, 1)

    def __sub__(self, earlier: SpecCounts) -> SpecCounts:
        return self._combine(earlier, -1)

    def as_dict(self) -> dict[str, Any]:
        """Counts and ratios for JSON, plain types only."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        ratios = {
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_request_step": self.tokens_per_request_step,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "rate_per_position": list(self.rate_per_position),
        }
        lists = {name: list(counts[name]) for name in _PER_POSITION}
        return counts | lists | {name: dict(counts[name]) for name in _BY_NAME} | ratios

    def _combine(self, other: SpecCounts, sign: int) -> SpecCounts:
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in SCALARS}
        return SpecCounts(
            drafted_per_pos=_added(self.drafted_per_pos, other.drafted_per_pos, sign),
            accepted_per_pos=_added(self.accepted_per_pos, other.accepted_per_pos, sign),
            skipped=_merged(self.skipped, other.skipped, sign),
            faults=_merged(self.faults, other.faults, sign),
            **sums,
        )


_PER_POSITION = ("drafted_per_pos", "accepted_per_pos")
_BY_NAME = ("skipped", "faults")
SCALARS = tuple(f.name for f in fields(SpecCounts) if f.name not in (*_PER_POSITION, *_BY_NAME))


def _added(mine: tuple[int, ...], other: tuple[int, ...], sign: int) -> tuple[int, ...]:
    """Position by position, without zeros at the end: a difference is as long as what happened in it."""
    total = [a + sign * b for a, b in zip_longest(mine, other, fillvalue=0)]
    while total and total[-1] == 0:
        total.pop()
    return tuple(total)


def _merged(mine: Mapping[str, int], other: Mapping[str, int], sign: int) -> Mapping[str, int]:
    totals = {name: mine.get(name, 0) + sign * other.get(name, 0) for name in (*mine, *other)}
    return {name: total for name, total in totals.items() if total}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """How many values fell into each bucket. ``later - earlier`` is what was counted between."""

    bounds: tuple[float, ...]
    """Upper bounds, each inside its own bucket; ascending."""
    counts: tuple[int, ...]
    """One more than bounds: the last counts what lies above all of them."""
    total: float = 0.0
    """Sum of the values."""

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """None without values."""
        count = self.count
        return self.total / count if count else None

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(bound, values up to it), the last bound infinite: a Prometheus histogram's buckets."""
        return zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True)

    def quantile(self, q: float) -> float | None:
        """Interpolated within its bucket, as Prometheus does; the highest bound at most. None without values.

        Args:
            q: 0 … 1.
        """
        rank = q * self.count
        below, low = 0, 0.0
        for high, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return low + (high - low) * (rank - below) / count
            below, low = below + count, high
        return self.bounds[-1] if self.counts[-1] else None

    def __sub__(self, earlier: HistogramCounts) -> HistogramCounts:
        counts = tuple(a - b for a, b in zip(self.counts, earlier.counts, strict=True))
        return HistogramCounts(self.bounds, counts, self.total - earlier.total)


class Histogram:
    """Adds values up; written by one thread.

    Args:
        bounds: upper bounds of the buckets, ascending.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)
