"""How far a drafter's own KV goes, for every lane and every block.

Beyond a lane's watermark its KV is garbage: never read, never offered to others. That one rule covers steps without
speculation, full acceptance (the last draft was never ingested), gated writes, prefix hits, preemption and chunked
prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import Ints
from dynaspec.kv.tables import BlockTables


class Watermarks:
    """Committed tokens that the drafter has ingested."""

    def __init__(self, tables: BlockTables, max_lanes: int, unread: int = 0) -> None:
        """
        Args:
            unread: tokens at the beginning of every text that the drafter never reads.
        """
        self._unread = unread
        self.seen: Ints = np.full(max_lanes, unread, dtype=np.int64)
        """[lanes]"""
        self._ahead: Ints = np.zeros(max_lanes, dtype=np.int64)
        """[lanes] draft tokens ingested on top, whose fate is open."""
        self._processed: Ints = np.zeros(max_lanes, dtype=np.int64)
        """[lanes] draft tokens processed on top; more than ``_ahead`` where some left no usable KV."""
        self._wasted: Ints = np.zeros(max_lanes, dtype=np.int64)
        """[lanes] committed tokens, the first behind the watermark, that were processed in vain."""
        self._open = False
        """Draft tokens have been ingested since the last ``settle``."""
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
        self.seen[lane] = max(valid * self._tables.block_size, self._unread)
        self._ahead[lane] = self._processed[lane] = self._wasted[lane] = 0

    def ingested(self, lane: int) -> int:
        """Tokens whose KV is where it belongs, those of the latest draft included."""
        return int(self.seen[lane] + self._ahead[lane])

    def rewind(self, lane: int, seen: int) -> None:
        """Only the first ``seen`` of the tokens ingested are the text's."""
        self.seen[lane] = seen
        self._ahead[lane] = self._processed[lane] = self._wasted[lane] = 0

    def ingest(self, lanes: Ints, seen: Ints) -> int:
        """The drafter has processed the first ``seen`` committed tokens of each of these lanes.

        Returns:
            How many of those that were new to the watermarks it had processed before.
        """
        before = self.seen[lanes]
        again, full = move_marks(
            self.seen, self._ahead, self._processed, self._wasted, lanes, seen, self._tables.block_size
        )
        if full:
            self._mark_full(lanes, before, seen)
        return int(again)

    def spoil(self, lane: int, first: int) -> None:
        """What is in a lane's blocks from that one on is not the KV of their tokens, even where it once was."""
        self._valid_in[self._tables.blocks(lane)[first:]] = -1

    def ingest_drafts(self, lanes: Ints, processed: Ints, in_place: Ints) -> None:
        """… and the first ``processed`` draft tokens of each of these.

        Args:
            in_place: of those, how many from the first on have left their KV where it belongs.
        """
        self._processed[lanes] = processed
        self._ahead[lanes] = in_place
        self._open = True

    def settle(self, lanes: Ints, lengths: Ints, accepted: Ints) -> None:
        """Of the ingested draft tokens, the accepted ones now are committed.

        Args:
            lanes, lengths, accepted: see ``TargetStep``.
        """
        if not self._open:
            return
        self._open = False
        won = np.minimum(self._ahead[lanes], accepted)
        self._wasted[lanes] += np.minimum(self._processed[lanes], accepted) - won
        self._ahead[:] = self._processed[:] = 0  # of a step that failed, too
        before = self.seen[lanes]
        self.seen[lanes] = before + won
        self._mark_full(lanes, before, before + won)

    def _mark_full(self, lanes: Ints, before: Ints, seen: Ints) -> None:
        """Marks the blocks that moving the watermarks has filled."""
        size = self._tables.block_size
        for i in np.flatnonzero(before // size != seen // size).tolist():
            full = self._tables.blocks(int(lanes[i]))[before[i] // size : seen[i] // size]
            self._valid_in[full] = self._tables.pool.generation[full]


@kernel
def move_marks(
    watermarks: Ints, ahead: Ints, processed: Ints, wasted: Ints, lanes: Ints, seen: Ints, block_size: int
) -> tuple[int, bool]:
    """Moves the watermarks of ``lanes`` to ``seen``; how many tokens were processed again, whether a block is full."""
    again, full = 0, False
    for i in range(lanes.size):
        lane = lanes[i]
        twice = min(wasted[lane], seen[i] - watermarks[lane])
        again += twice
        wasted[lane] -= twice
        ahead[lane] = processed[lane] = 0
        full |= watermarks[lane] // block_size != seen[i] // block_size
        watermarks[lane] = seen[i]
    return again, full
