"""The running totals of one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from dynaspec.contract.step import StepOutcome

from .counts import SCALARS, SpecCounts
from .meters import StepMeter


class SpecStats:
    """Adds up step outcomes, skipped drafts, proposer faults and preemptions.

    Written by one thread; any thread may take a snapshot. Adds in place: a ``SpecCounts`` for every step
    would take five times as long.
    """

    def __init__(self) -> None:
        self.steps = StepMeter()
        """Told of every outcome too; not locked."""
        self._lock = Lock()
        self._totals: dict[str, Any] = dict.fromkeys(SCALARS, 0)
        self._drafted_per_pos: list[int] = []
        self._accepted_per_pos: list[int] = []
        self._skipped: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()

    def record(self, outcome: StepOutcome) -> None:
        """A step has been committed."""
        work, totals = outcome.work, self._totals
        self.steps.record(outcome)
        with self._lock:
            totals["steps"] += 1
            totals["request_steps"] += len(outcome.ids)
            totals["target_passes"] += 1 if outcome.ids or work.prefill_rows > 0 else 0
            totals["drafter_passes"] += len(work.rows_per_pass)
            totals["prefill_rows"] += work.prefill_rows
            totals["emitted"] += sum(outcome.emitted)
            totals["draft_s"] += outcome.draft_s
            totals["verify_s"] += outcome.verify_s
            totals["step_s"] += outcome.step_s
            totals["kv_skipped"] += work.kv_skipped
            totals["kv_redone"] += work.kv_redone
            if any(outcome.requested):
                self._record_drafts(outcome)

    def skip(self, reasons: Mapping[str, int]) -> None:
        """Drafts came to nothing: how many, by the reason."""
        for reason, count in reasons.items():  # for a few, in less than half the time that ``update`` takes
            self._skipped[reason] += count

    def proposer_fault(self, kind: str) -> None:
        """A proposer failed: see ``SpecCounts.faults``."""
        with self._lock:
            self._totals["proposer_faults"] += 1
            self._faults[kind] += 1

    def preemption(self, count: int = 1) -> None:
        """Requests lost their KV and wait again."""
        with self._lock:
            self._totals["preemptions"] += count

    def merge(self, other: SpecCounts) -> None:
        """Adds another engine's totals. ``steps`` is left as it is: it says what this engine's own steps are like."""
        with self._lock:
            for name in SCALARS:
                self._totals[name] += getattr(other, name)
            _add(self._drafted_per_pos, other.drafted_per_pos)
            _add(self._accepted_per_pos, other.accepted_per_pos)
            self._skipped.update(other.skipped)
            self._faults.update(other.faults)

    def snapshot(self) -> SpecCounts:
        """The totals so far; later ones minus this are what happened since."""
        with self._lock:
            return SpecCounts(
                **self._totals,
                drafted_per_pos=tuple(self._drafted_per_pos),
                accepted_per_pos=tuple(self._accepted_per_pos),
                skipped=dict(self._skipped),
                faults=dict(self._faults),
            )

    def _record_drafts(self, outcome: StepOutcome) -> None:
        totals, drafted = self._totals, outcome.drafted
        asked = [k for k in outcome.requested if k > 0]
        totals["proposals"] += len(asked)
        totals["tokens_requested"] += sum(asked)
        totals["early_exits"] += sum(outcome.early_exit)
        totals["drafts"] += len(drafted) - drafted.count(0)
        totals["draft_tokens"] += sum(drafted)
        totals["verified"] += sum(outcome.verified)
        totals["accepted"] += sum(outcome.accepted)
        totals["draft_emitted"] += sum([e for d, e in zip(drafted, outcome.emitted, strict=True) if d])
        _count(self._drafted_per_pos, drafted)
        _count(self._accepted_per_pos, outcome.accepted)


def _count(per_pos: list[int], lengths: Sequence[int]) -> None:
    """Entry j grows by the number of lengths > j."""
    per_pos.extend([0] * (max(lengths) - len(per_pos)))
    for length in lengths:
        for j in range(length):
            per_pos[j] += 1


def _add(mine: list[int], other: Sequence[int]) -> None:
    mine.extend([0] * (len(other) - len(mine)))
    for j, count in enumerate(other):
        mine[j] += count
