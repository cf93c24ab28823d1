"""What speculation did, in counts and seconds; ratios are computed when they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any


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
