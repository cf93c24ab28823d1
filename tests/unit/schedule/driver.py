"""A scheduler without an engine: batches are planned and committed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dynaspec.contract.step import SpecPlan, TreeRule
from dynaspec.kv.blocks import BlockPool, BlockTables
from dynaspec.sampling.grammar import DeadEnd
from dynaspec.schedule.batch import Committed, StepBatch, StepResult
from dynaspec.schedule.request import Request
from dynaspec.schedule.scheduler import Lanes, Scheduler

TOKEN = 3
"""What every row of these scenarios gives."""


class Driver:
    """One scheduler with blocks of 4 tokens; every step is followed by a check of the books."""

    def __init__(
        self, *, blocks: int = 64, lanes: int = 4, rows: int = 64, longest: int = 100, caching: bool = True
    ) -> None:
        self.tables = BlockTables(BlockPool(blocks), lanes, longest, 4, caching=caching)
        self.lanes = Lanes(lanes, longest)
        self.now = 0.0
        self.plans = 0
        self.planned: SpecPlan | None = None
        """The latest plan, as far as it could be carried out."""
        self.scheduler = Scheduler(self.lanes, self.tables, rows, self._clock)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def plan(self, depth: int | Sequence[int] = 0, nodes: int | None = None) -> StepBatch:
        """A batch with KV reserved for ``depth`` drafts a request, or for trees of so many ``nodes``."""
        self.plans += 1
        if self.plans > 1000:
            raise AssertionError("a scenario has not come to its end after 1000 steps")
        batch = self.scheduler.next_batch()
        wanted = (depth,) * len(batch.requests) if isinstance(depth, int) else tuple(depth)
        if not batch.empty:
            sizes = wanted if nodes is None else (nodes,) * len(wanted)
            tree = None if nodes is None else TreeRule(2)
            self.planned = self.scheduler.reserve(
                batch, SpecPlan(batch.step, wanted, (0,) * len(wanted), sizes, tree=tree)
            )
        self.scheduler.verify_integrity()
        return batch

    def commit(
        self,
        batch: StepBatch,
        accepted: int | Sequence[int] = 0,
        *,
        tokens: Sequence[Sequence[int]] | None = None,
        dead_ends: Mapping[str, DeadEnd] | None = None,
    ) -> Committed:
        """Accepts that many drafts of each request (no more than granted)."""
        size = len(batch.requests)
        wanted = np.full(size, accepted) if isinstance(accepted, int) else np.array(accepted)
        column = np.minimum(wanted, batch.granted).astype(np.int64)
        emitted = np.full((size, int(column.max(initial=0)) + 1), TOKEN, dtype=np.int64)
        for i, row in enumerate(tokens or ()):
            emitted[i, : len(row)] = row
        chunk_tokens = [TOKEN if chunk.completes else None for chunk in batch.chunks]
        result = StepResult(batch.granted.copy(), batch.granted.copy(), column, emitted, chunk_tokens)
        result.dead_ends.update(dead_ends or {})
        committed = self.scheduler.commit(batch, result)
        self.scheduler.verify_integrity()
        return committed

    def settle(self, batch: StepBatch) -> list[int] | None:
        """Brings a batch planned ahead up to date; an empty one is given up, as ``engine.step`` does."""
        keep = self.scheduler.settle(batch)
        if batch.empty:
            self.scheduler.discard(batch)
        self.scheduler.verify_integrity()
        return keep

    def step(self, depth: int | Sequence[int] = 0, accepted: int | Sequence[int] = 0) -> StepBatch:
        batch = self.plan(depth)
        if not batch.empty:
            self.commit(batch, accepted)
        return batch

    def finish(self) -> int:
        """Plain steps until nobody is left; how many."""
        for steps in range(1000):
            if not self.scheduler.unfinished:
                return steps
            self.step()
        raise AssertionError("requests are still unfinished after 1000 steps")

    def snapshot(self) -> tuple[object, ...]:
        """All that a step may change for good: blocks of every lane, lengths, and what the prefix cache offers."""
        pool = self.tables.pool
        return (
            [list(self.tables.blocks(lane)) for lane in range(len(self.lanes.requests))],
            *(column.tolist() for column in (self.lanes.length, self.lanes.computed, self.lanes.expected)),
            self.lanes.expected_computed.tolist(),
            dict(pool._block_of),
            list(pool._free),
        )

    def _clock(self) -> float:
        self.now += 1.0
        return self.now


def ids(batch: StepBatch) -> list[str]:
    return list(batch.ids)


def chunks(batch: StepBatch) -> list[tuple[str, int, int, bool]]:
    """(request, start, count, completes) of each prefill chunk."""
    return [(c.request.id, c.start, c.count, c.completes) for c in batch.chunks]
