"""No speculation: drafts nothing, so that plain decoding takes the same road as everything else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynaspec.contract.proposer import DecodeBatch, Drafts, NewText, ProposerNeeds, TargetStep
from dynaspec.contract.step import ProposerTraits, SpecPlan


def no_drafts(requests: int) -> Drafts:
    """Drafts of length 0 for every request."""
    return Drafts(
        tokens=np.zeros((requests, 0), dtype=np.int64),
        lens=np.zeros(requests, dtype=np.int64),
        early_exit=np.zeros(requests, dtype=np.bool_),
    )


class NoProposer:
    """The proposer of plain decoding."""

    traits = ProposerTraits(name="none", passes_per_draft="none", has_confidence=False)
    needs = ProposerNeeds()

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return (0,) * len(batch.ids)

    def peek(self, batch: DecodeBatch) -> tuple[tuple[int, int], ...] | None:
        return None

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        return no_drafts(len(batch.ids))

    def advance(self, step: TargetStep) -> None:
        """Nothing to keep."""

    def commit(self, text: NewText) -> None:
        """Nothing to keep."""

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        """Nothing to keep."""

    def evict(self, lane: int) -> None:
        """Nothing to keep."""
