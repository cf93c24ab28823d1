"""How far a drafter's own KV goes, for every lane and every block.

Beyond a lane's watermark its KV is garbage: never read, never offered to others. That one rule covers steps without
speculation, full acceptance (the last draft was never ingested), prefix hits, preemption and chunked prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynaspec.contract.proposer import Ints
from dynaspec.kv.tables import BlockTables


class Watermarks:
    """Committed tokens that the drafter has ingested."""

    def __init__(self, tables: BlockTables, max_lanes: int) -> None:
        self.seen: Ints = np.zeros(max_lanes, dtype=np.int64)
        """[lanes]"""
        self._ahead: Ints = np.zeros(max_lanes, dtype=np.int64)
        """[lanes] draft tokens ingested on top, whose fate is open."""
        self._tables = tables
        self._valid_in = np.full(tables.pool.num_blocks, -1, dtype=np.int64)
        """[blocks] the pool's generation in which the drafter's KV of the block became valid."""

    def admit(self, lane: int, cached_blocks: Sequence[int]) -> None:
        """Starts a lane behind the leading cached blocks whose KV this drafter has as well."""
        valid = 0
        for block in cached_blocks:
            if self._valid_in[block] != self._tables.pool.generation[block]:
                break
            valid += 1
        self.seen[lane] = valid * self._tables.block_size
        self._ahead[lane] = 0

    def ingest(self, lane: int, seen: int) -> None:
        """The drafter has processed the first ``seen`` committed tokens of a lane."""
        before, self.seen[lane] = int(self.seen[lane]), seen
        self._ahead[lane] = 0
        self._mark(lane, before, seen)

    def ingest_drafts(self, lanes: Ints) -> None:
        """… and one more draft token of each of these."""
        self._ahead[lanes] += 1

    def settle(self, lanes: Ints, lengths: Ints, accepted: Ints) -> None:
        """Of the ingested draft tokens, the accepted ones now are committed.

        Args:
            lanes, lengths, accepted: see ``TargetStep``.
        """
        won = np.minimum(self._ahead[lanes], accepted)
        before = self.seen[lanes]
        self.seen[lanes] = before + won
        self._ahead[lanes] = 0
        size = self._tables.block_size
        for i in np.flatnonzero(before // size != (before + won) // size):
            self._mark(int(lanes[i]), int(before[i]), int(before[i] + won[i]))

    def _mark(self, lane: int, before: int, seen: int) -> None:
        size = self._tables.block_size
        for block in self._tables.blocks(lane)[before // size : seen // size]:
            self._valid_in[block] = self._tables.pool.generation[block]
