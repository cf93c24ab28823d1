"""Continuous batching: admission in order of arrival, chunked prefill, preemption by recomputation.

One step may be in flight while the next is scheduled (``plan_lag`` 1). Nothing here asks which mode it is: the
scheduler plans by ``Lanes.expected``, ``commit`` subtracts what did not happen, and ``settle`` brings a batch
that was planned ahead up to date before its inputs are built.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dynaspec.contract.errors import RequestError
from dynaspec.contract.proposer import Ints
from dynaspec.contract.step import SpecPlan
from dynaspec.kv.blocks import BlockTables

from .batch import Admission, Chunk, Committed, StepBatch, StepResult
from .request import Request


class Lanes:
    """Per-request state of running requests, as columns over a fixed number of lanes; free ones are handed out lowest
    first.

    A request keeps its lane from admission until it ends or is preempted. Two lengths are kept apart:

        length      committed tokens; the last of them has been processed by no model yet
        expected    the same if every step in flight commits all it may: what the next step is scheduled by

    They are equal whenever no step is in flight; ``commit`` subtracts the surplus of a step that committed less.
    """

    def __init__(self, max_lanes: int, max_tokens: int) -> None:
        self.tokens: npt.NDArray[np.int32] = np.zeros((max_lanes, max_tokens + 1), dtype=np.int32)
        self.length: Ints = np.zeros(max_lanes, dtype=np.int64)
        self.computed: Ints = np.zeros(max_lanes, dtype=np.int64)
        """Tokens whose target KV is valid."""
        self.expected: Ints = np.zeros(max_lanes, dtype=np.int64)
        self.expected_computed: Ints = np.zeros(max_lanes, dtype=np.int64)
        self.max_length: Ints = np.zeros(max_lanes, dtype=np.int64)
        self.branches: Ints = np.zeros(max_lanes, dtype=np.int64)
        """Nodes of a tree in flight beyond its depth: they have KV, too."""
        self.last_draft: Ints = np.zeros(max_lanes, dtype=np.int64)
        """Draft tokens granted last; an estimate of the rows that a lane will take next."""
        self.requests: list[Request | None] = [None] * max_lanes
        self._free = list(range(max_lanes - 1, -1, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def next_free(self) -> int:
        return self._free[-1]

    def open(self, request: Request, computed: int) -> int:
        """Seats a request, ``computed`` of whose tokens are already in the prefix cache."""
        lane = self._free.pop()
        tokens = request.tokens()
        self.tokens[lane, : len(tokens)] = tokens
        self.length[lane] = self.expected[lane] = len(tokens)
        self.computed[lane] = self.expected_computed[lane] = computed
        self.max_length[lane] = request.max_length
        self.branches[lane] = self.last_draft[lane] = 0
        self.requests[lane] = request
        request.lane = lane
        return lane

    def vacate(self, lane: int) -> None:
        """The request leaves. The lane itself is handed out again only after ``reuse``."""
        request = self.requests[lane]
        if request is not None:
            request.lane = None
        self.requests[lane] = None

    def reuse(self, lane: int) -> None:
        """No step in flight reads the lane any more."""
        self._free.append(lane)
        self._free.sort(reverse=True)


class Scheduler:
    """Owns the queue, the lanes and the block tables."""

    def __init__(self, lanes: Lanes, tables: BlockTables, max_batched_tokens: int, clock: Callable[[], float]) -> None:
        self.lanes = lanes
        self.tables = tables
        self.preemptions = 0
        self.prefix_queries = self.prefix_hits = 0
        """Tokens of requests looked up in the prefix cache when they were seated first, and those found."""
        self._max_rows = max_batched_tokens
        self._clock = clock
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        """In order of arrival."""
        self._limbo: list[tuple[int, int]] = []
        """(lane, last step that may read it) of requests that left."""
        self._vacated: list[int] = []
        """Lanes that are free again, which the next batch tells the runner."""
        self._aborted: list[str] = []
        """Requests that the next commit reports."""
        self._scheduled = 0
        self._committed = 0

    # --- requests ---------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def ensure_fits(self, request: Request) -> None:
        """
        Raises:
            RequestError: the request could not be run even with all KV memory to itself.
        """
        capacity = self.tables.pool.num_blocks * self.tables.block_size
        if request.max_length > capacity:
            raise RequestError(
                f"prompt and max_tokens come to {request.max_length} tokens but the KV cache holds {capacity}; "
                "expected a shorter request or a larger kv_cache_memory"
            )

    def add(self, request: Request) -> None:
        """Queues a request that fits."""
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """Ends a request wherever it is; a step in flight for it is discarded."""
        if request.finished:
            return
        if request.lane is None:
            self._waiting.remove(request)
        else:
            self._leave(request)
        request.end("abort", self._clock())
        self._aborted.append(request.id)

    # --- planning ---------------------------------------------------------------------------------------------

    def next_batch(self) -> StepBatch:
        """All requests that decode, then prefill chunks as far as the row budget goes. May be empty."""
        self._reuse_lanes()
        preempted = self._secure_slots()
        decoding = [r for r in self._running if self._decodes(r)]
        budget = self._rows_for_prompts(decoding)
        chunks = self._continue_prefills(budget)
        budget -= sum(chunk.count for chunk in chunks)
        admitted = [] if preempted else self._admit(budget, decoding, chunks)
        lanes = np.array([r.lane for r in decoding], dtype=np.int64)
        batch = StepBatch(
            step=self._scheduled + 1,
            requests=tuple(decoding),
            lanes=lanes,
            lengths=self.lanes.expected[lanes],
            room=self.lanes.max_length[lanes] - self.lanes.expected[lanes] - 1,
            tokens=self.lanes.tokens,
            block_tables=self.tables.array,
            chunks=chunks,
            waiting=len(self._waiting),
            admitted=admitted,
        )
        if not batch.empty:
            batch.vacated, self._vacated = self._vacated, []
        return batch

    def reserve(self, batch: StepBatch, plan: SpecPlan) -> SpecPlan:
        """KV for what was granted. Shrinks the plan where rooms, rows or blocks run out; never preempts."""
        lanes = self.lanes
        spare_rows = max(0, self._max_rows - len(batch.requests) - batch.prefill_tokens)
        granted, sizes = np.zeros((2, len(batch.requests)), dtype=np.int64)
        for i, (wanted, nodes) in enumerate(zip(plan.depth, plan.nodes, strict=True)):
            lane, length = int(batch.lanes[i]), int(batch.lengths[i])
            held = len(self.tables.blocks(lane)) + self.tables.pool.free_count
            caps = {
                "no_room": int(batch.room[i]),
                "no_rows": spare_rows,
                "no_blocks": held * self.tables.block_size - length,
            }
            reason = min(caps, key=caps.__getitem__)
            depth = max(0, min(wanted, caps[reason]))
            if depth < wanted:
                batch.skipped[reason] = batch.skipped.get(reason, 0) + 1
            size = min(nodes, caps["no_rows"], caps["no_blocks"]) if depth and plan.tree else depth
            self.tables.try_grow(lane, length + size)
            spare_rows -= size
            granted[i], sizes[i] = depth, size
        lanes.expected[batch.lanes] += granted + 1
        lanes.expected_computed[batch.lanes] += granted + 1
        lanes.branches[:] = 0  # of a step in flight, the requests that this one leaves out give theirs back with it
        lanes.branches[batch.lanes] = sizes - granted
        lanes.last_draft[batch.lanes] = sizes
        for chunk in batch.chunks:
            lanes.expected_computed[chunk.lane] += chunk.count
            lanes.expected[chunk.lane] += int(chunk.completes)
        batch.granted = granted
        self._scheduled = batch.step
        columns = tuple(granted.tolist()), tuple(sizes.tolist())
        return plan if columns == (plan.depth, plan.nodes) else plan.with_nodes(*columns)

    def settle(self, batch: StepBatch) -> list[int] | None:
        """Drops requests that left since the batch was planned, and reads the true lengths.

        Returns:
            The indices of the decoding requests that stay, or None if all do.
        """
        keep = [i for i, r in enumerate(batch.requests) if r.lane == batch.lanes[i]]
        gone = len(keep) < len(batch.requests)
        if gone:
            batch.requests = tuple(batch.requests[i] for i in keep)
            batch.lanes, batch.room, batch.granted = batch.lanes[keep], batch.room[keep], batch.granted[keep]
        batch.chunks = [c for c in batch.chunks if c.request.lane == c.lane]
        batch.admitted = [a for a in batch.admitted if a.request.lane == a.lane]
        batch.lengths = self.lanes.length[batch.lanes]
        return keep if gone else None

    def discard(self, batch: StepBatch) -> None:
        """A planned step will not be committed: its requests, if any are left, are recomputed."""
        planned = {*batch.requests, *(chunk.request for chunk in batch.chunks)}
        for request in [r for r in reversed(self._running) if r in planned]:
            self._preempt(request)
        self._vacated += batch.vacated
        self._committed = batch.step

    # --- results ----------------------------------------------------------------------------------------------

    def commit(self, batch: StepBatch, result: StepResult) -> Committed:
        """Makes a step's tokens output, up to each request's end, and gives back the KV of rejected ones."""
        now = self._clock()
        self._committed = batch.step
        if batch.step == self._scheduled:  # else branches are those of the step in flight
            self.lanes.branches[batch.lanes] = 0
        emitted = np.zeros(len(batch.requests), dtype=np.int64)
        for i, request in enumerate(batch.requests):
            if request.lane == batch.lanes[i]:
                own = int(request.id not in result.dead_ends)
                tokens = result.tokens[i, : result.accepted[i] + own].tolist()
                emitted[i] = self._commit_tokens(request, tokens, int(batch.granted[i]) + 1, result, now)
                _count_draft(request, result, i, int(emitted[i]))
        for chunk, token in zip(batch.chunks, result.chunk_tokens, strict=True):
            if chunk.request.lane == chunk.lane:
                self._commit_chunk(chunk, token, result, now)
        aborted, self._aborted = self._aborted, []
        return Committed(emitted, aborted)

    def verify_integrity(self) -> None:
        """Compares block tables, reference counts and prefix cache; for tests and idle moments.

        Raises:
            IntegrityError: they contradict each other.
        """
        self.tables.verify_integrity()

    # --- inside -----------------------------------------------------------------------------------------------

    def _seated(self) -> list[tuple[int, Request]]:
        return [(request.lane, request) for request in self._running if request.lane is not None]

    def _decodes(self, request: Request) -> bool:
        lane, lanes = request.lane, self.lanes
        one_left = lanes.expected[lane] - lanes.expected_computed[lane] == 1
        return bool(one_left and lanes.expected[lane] < lanes.max_length[lane])

    def _secure_slots(self) -> bool:
        """One KV slot for every decoding request, oldest first; the youngest give way. True if one had to."""
        before = self.preemptions
        for request in list(self._running):
            while request.lane is not None and self._decodes(request):
                if self.tables.try_grow(request.lane, int(self.lanes.expected[request.lane])):
                    break
                self._preempt(self._running[-1])
        return self.preemptions > before

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        lane = request.lane
        if lane is not None:
            self.tables.close(lane)
            self.lanes.vacate(lane)
            self._limbo.append((lane, self._scheduled))
            self._running.remove(request)

    def _reuse_lanes(self) -> None:
        """Frees lanes that no step in flight reads any more."""
        for lane, step in self._limbo:
            if step <= self._committed:
                self.lanes.reuse(lane)
                self._vacated.append(lane)
        self._limbo = [(lane, step) for lane, step in self._limbo if step > self._committed]

    def _rows_for_prompts(self, decoding: list[Request]) -> int:
        """Rows that drafts as long as the last ones leave, but at least a block where decoding leaves that much."""
        left = self._max_rows - len(decoding)
        drafts = sum(int(self.lanes.last_draft[lane]) for lane in (r.lane for r in decoding) if lane is not None)
        return max(left - drafts, min(left, self.tables.block_size))

    def _continue_prefills(self, budget: int) -> list[Chunk]:
        chunks = []
        for lane, request in self._seated():
            left = int(self.lanes.expected[lane] - self.lanes.expected_computed[lane])
            if left > 1 and budget > 0:
                chunks.append(self._chunk(request, lane, left, budget))
                budget -= chunks[-1].count
        return chunks

    def _admit(self, budget: int, decoding: list[Request], chunks: list[Chunk]) -> list[Admission]:
        """Seats waiting requests while lanes, rows and blocks last; extends ``decoding`` or ``chunks``."""
        admitted: list[Admission] = []
        while self._waiting and self.lanes.free_count and budget > 0:
            request = self._waiting[0]
            cached = self._cached_prefix(request)
            computed = len(cached) * self.tables.block_size
            lane = self._try_seat(request, cached, computed)
            if lane is None:
                break
            self._waiting.popleft()
            self._running.append(request)
            if request.preemptions == 0:
                self._seated_first(request, computed)
            admitted.append(Admission(request, lane, tuple(cached)))
            if self._decodes(request):
                decoding.append(request)
                budget -= 1
            else:
                chunks.append(self._chunk(request, lane, request.length - computed, budget))
                budget -= chunks[-1].count
        return admitted

    def _seated_first(self, request: Request, cached_tokens: int) -> None:
        request.scheduled_s = self._clock()
        request.cached_tokens = cached_tokens
        if self.tables.caching and not self._wants_all_rows(request):
            self.prefix_queries += request.length
            self.prefix_hits += cached_tokens

    def _cached_prefix(self, request: Request) -> list[int]:
        return [] if self._wants_all_rows(request) else self.tables.match(request.tokens(), request.cache_salt)

    @staticmethod
    def _wants_all_rows(request: Request) -> bool:
        """Its prompt is computed anew, as each of its rows is asked for."""
        asked = request.params.prompt_logprobs is not None
        return asked and len(request.prompt_logprobs) < len(request.prompt) - 1

    def _try_seat(self, request: Request, cached: list[int], computed: int) -> int | None:
        """A lane with blocks for all tokens, leaving a block for each running request; None if there is none."""
        if self._running and self._left_after(request, cached) < len(self._running):
            return None
        if not self.tables.try_open(self.lanes.next_free, cached, request.length, request.cache_salt):
            return None
        return self.lanes.open(request, computed)

    def _left_after(self, request: Request, cached: list[int]) -> int:
        """Blocks left to others once a request is seated; cached ones that nobody holds are taken like fresh ones."""
        pool = self.tables.pool
        for block in cached:
            pool.share(block)
        left = pool.free_count + len(cached) - -(-request.length // self.tables.block_size)
        pool.release(cached)
        return left

    def _chunk(self, request: Request, lane: int, left: int, budget: int) -> Chunk:
        count = min(left, budget)
        start = int(self.lanes.expected_computed[lane])
        return Chunk(request, lane, start, count, completes=count == left)

    def _commit_tokens(self, request: Request, tokens: list[int], room: int, result: StepResult, now: float) -> int:
        """Commits what a request's rows gave; ``room`` is what ``reserve`` expected of them at most."""
        lanes, lane = self.lanes, request.lane
        if lane is None:
            return 0
        taken = request.commit(tokens, now, result.dead_ends.get(request.id))
        length = int(lanes.length[lane])
        lanes.tokens[lane, length : length + taken] = tokens[:taken]
        request.logprobs += result.logprobs.get(request.id, [])[:taken]
        request.steps += 1
        lanes.length[lane] += taken
        lanes.computed[lane] += taken
        lanes.expected[lane] -= room - taken
        lanes.expected_computed[lane] -= room - taken
        self._publish_and_trim(request, lane, now)
        return taken

    def _commit_chunk(self, chunk: Chunk, token: int | None, result: StepResult, now: float) -> None:
        lanes, request, lane = self.lanes, chunk.request, chunk.lane
        request.prompt_logprobs += result.prompt_logprobs.get(request.id, [])
        lanes.computed[lane] += chunk.count
        if token is None:
            self.tables.publish(lane, lanes.tokens[lane], int(lanes.computed[lane]))
            return
        tokens, length = [] if request.id in result.dead_ends else [token], int(lanes.length[lane])
        taken = request.commit(tokens, now, result.dead_ends.get(request.id))
        lanes.tokens[lane, length : length + taken] = tokens
        lanes.length[lane] += taken
        request.logprobs += result.logprobs.get(request.id, [])[:taken]
        self._publish_and_trim(request, lane, now)

    def _publish_and_trim(self, request: Request, lane: int, now: float) -> None:
        self.tables.publish(lane, self.lanes.tokens[lane], int(self.lanes.computed[lane]))
        if request.finish_reason is not None:
            self._leave(request)
            request.end(request.finish_reason, now)
        else:
            self.tables.shrink(lane, int(self.lanes.expected[lane] + self.lanes.branches[lane]))


def _count_draft(request: Request, result: StepResult, i: int, emitted: int) -> None:
    if request.draft_counts is not None:
        request.draft_counts.add(
            drafted=int(result.drafted[i]),
            verified=int(result.verified[i]),
            accepted=min(emitted, int(result.accepted[i])),
            emitted=emitted,
        )
