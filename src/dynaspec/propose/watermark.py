"""Watermarks: how far a drafter's own KV goes, for every lane and every block, and which tokens it lacks.

Beyond a lane's watermark its KV is garbage: never read, never offered to others. That one rule covers steps without
speculation, full acceptance (the last draft was never ingested), gated writes, prefix hits, preemption and chunked
prefill. The tokens that it lacks are rows of its first pass.

Under KV-write gating draft tokens of little confidence leave no KV behind. A gated token is still processed, and the
next one drafted from it, but it gets no slot, so that no later token sees it. The KV of the tokens after it closes up,
behind the last one written, while their positions stay true. Slots are the host's, so on CUDA it waits for every pass's
confidences.

For a probe only the latest tokens of a request may be read, see ``SpecPlan.probe_context``. They keep their positions
and slots, but see nothing of what is before them. So the blocks before are left out of the request's table. Blocks that
others read as well may hold KV that is valid for them: those are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import DecodeBatch, Ints
from dynaspec.kv.blocks import BlockTables
from dynaspec.kv.rows import RaggedRows, fill_rows, tokens_at

Int32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@kernel
def unread_rows(
    texts: Int32,
    tables: Int32,
    block_size: int,
    lanes: Ints,
    lengths: Ints,
    read: Ints,
    requests: Ints,
    most: int,
) -> tuple[Ints, Int32, Ints, Ints, tuple[Int32, Ints, Ints, Ints, Int32]]:
    """Rows of the committed tokens that a drafter lacks.

    Args:
        texts: [lanes, max length] tokens of all lanes; tables: [lanes, max blocks] of all lanes.
        lanes, lengths: [B]
        read: [B] tokens after which each request is read on.
        requests: [A] places in the batch.
        most: rows a request.

    Returns:
        Lanes of the requests [A]; tokens before the first row of each [A] and up to its last [A]; the rows' tokens [R];
        the fields of their ``RaggedRows``.
    """
    lane, start, end = lanes[requests], np.empty(requests.size, np.int64), np.empty(requests.size, np.int64)
    context = np.empty(requests.size, np.int32)
    for i in range(requests.size):
        start[i] = context[i] = read[requests[i]]
        end[i] = min(lengths[requests[i]], start[i] + most)
    rows = fill_rows(tables, block_size, lane, start, end - start)
    return lane, context, end, tokens_at(texts, rows[1], rows[2]), rows


@kernel
def slots_before(tables: Int32, block_size: int, lanes: Ints, positions: Ints) -> Ints:
    """[R] KV slots of the tokens before those at ``positions`` [R] of ``lanes`` [R]; of a text's first, its own."""
    slots = np.empty(positions.size, np.int64)
    for i in range(slots.size):
        before = max(positions[i] - 1, 0)
        slots[i] = np.int64(tables[lanes[i], before // block_size]) * block_size + before % block_size
    return slots


@kernel
def all_but_last(query_start: Int32) -> Int32:
    """[S] rows of each sequence but the last, see ``ForwardBatch.kv_only``; empty where each has one row."""
    sequences = query_start.size - 1
    before = np.empty(sequences if query_start[sequences] > sequences else 0, np.int32)
    for s in range(before.size):
        before[s] = query_start[s + 1] - query_start[s] - 1
    return before


@kernel
def columns_of(rows: Floats, columns: Ints) -> Floats:
    """[r, columns] of ``rows`` [r, …]."""
    found = np.empty((rows.shape[0], columns.size), np.float32)
    for i in range(rows.shape[0]):
        for j in range(columns.size):
            found[i, j] = rows[i, columns[j]]
    return found


class WriteGate:
    """Which draft tokens of one propose call keep their KV, and where."""

    def __init__(self, below: float, rows: int) -> None:
        """
        Args:
            below: tokens with less confidence leave none.
            rows: requests that draft.
        """
        self.skipped = 0
        """Tokens without KV so far."""
        self.in_place = np.zeros(rows, dtype=np.int64)
        """[rows] tokens before the first without KV, whose own is where it belongs once they are committed."""
        self._below = np.float32(below)
        self._written = np.zeros(rows, dtype=np.int64)

    def place(self, rows: Ints, done: int, confidence: npt.NDArray[np.float32]) -> tuple[Ints, Bools]:
        """Draft token number ``done`` (1-based) of some of the rows [r], given its confidence [r].

        Returns:
            KV entries [r] of the draft before it; whether its own is kept [r], after those.
        """
        ahead = self._written[rows]
        kept = confidence >= self._below
        self._written[rows] += kept
        self.in_place[rows] += kept & (ahead == done - 1)
        self.skipped += int(kept.size - np.count_nonzero(kept))
        return ahead, kept


def probe_from(batch: DecodeBatch, drafting: Bools, seen: Ints, tables: BlockTables, tokens: int) -> Ints:
    """
    Args:
        drafting: [B]
        seen: [B] committed tokens that the drafter has read of each request.
        tokens: most to be read of those of which it lacks more; they begin with a block, so it may be fewer, or for
            less than a block, more.

    Returns:
        [B] tokens before the first that is read: of requests that are not read in part, those that have been.
    """
    size = tables.block_size
    start = np.minimum(-(-np.maximum(batch.lengths - tokens, 0) // size), (batch.lengths - 1) // size) * size
    found = seen.copy()
    for i in np.flatnonzero(drafting & (start > seen)).tolist():
        blocks = tables.blocks(int(batch.lanes[i]))[start[i] // size :]
        if not any(map(tables.pool.is_shared, blocks)):
            found[i] = start[i]
    return found


def leave_out(rows: RaggedRows, context: npt.NDArray[np.int32], apart: Bools, block_size: int) -> None:
    """Rows of requests that are read ``apart`` [A] from the text before them see nothing of it.

    Args:
        rows: of the requests, in their order. Changed in place, as is ``context``.
        context: [A] tokens before the first row of each, which begins a block.
    """
    tables = rows.block_tables
    for i in np.flatnonzero(apart).tolist():
        before = int(context[i]) // block_size
        tables[i, : tables.shape[1] - before] = tables[i, before:].copy()
        context[i] = 0


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
