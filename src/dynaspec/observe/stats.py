"""The running totals of one engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from dynaspec.contract.step import StepOutcome

from .counts import SpecCounts, counts_of


class SpecStats:
    """Adds up step outcomes, skipped drafts, proposer faults and preemptions.

    Written by one thread; any thread may take a snapshot.
    """

    def __init__(self) -> None:
        self._counts = SpecCounts()
        # Apart, since one step may skip many drafts, each for its own reason.
        self._skipped: Counter[str] = Counter()

    def record(self, outcome: StepOutcome) -> None:
        """A step has been committed."""
        self._counts += counts_of(outcome)

    def skip(self, reason: str, count: int = 1) -> None:
        """Drafts that were granted came to nothing."""
        self._skipped[reason] += count

    def proposer_fault(self, count: int = 1) -> None:
        """The proposer raised or returned nonsense."""
        self._counts += SpecCounts(proposer_faults=count)

    def preemption(self, count: int = 1) -> None:
        """Requests lost their KV and wait again."""
        self._counts += SpecCounts(preemptions=count)

    def merge(self, other: SpecCounts) -> None:
        """Adds another engine's totals."""
        self._counts += replace(other, skipped={})
        self._skipped.update(other.skipped)

    def snapshot(self) -> SpecCounts:
        """The totals so far; later ones minus this are what happened since."""
        return replace(self._counts, skipped=dict(self._skipped))
