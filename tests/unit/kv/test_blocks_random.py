"""Any history of lanes keeps the books right, and a block never offers what it does not hold."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynaspec.kv.blocks import BlockPool, BlockTables

SIZE, LANES, BLOCKS, LONGEST = 2, 3, 9, 12


class Histories(RuleBasedStateMachine):
    """Holds, beside the tables, what each block would contain: the text up to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(BlockPool(BLOCKS), LANES, LONGEST, SIZE, caching=True)
        self.texts: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.content: dict[int, tuple[int, ...]] = {}

    def free_lane(self) -> int:
        return min(set(range(LANES)) - set(self.texts))

    @precondition(lambda self: len(self.texts) < LANES)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def open(self, tokens: list[int]) -> None:
        lane, cached = self.free_lane(), self.tables.match(np.array(tokens, dtype=np.int32))
        assert len(cached) * SIZE < len(tokens)
        for i, block in enumerate(cached):
            assert self.content[block] == tuple(tokens[: (i + 1) * SIZE])
        free = self.tables.pool.free_count
        if self.tables.try_open(lane, cached, len(tokens)):
            self.texts[lane], self.computed[lane] = list(tokens), len(cached) * SIZE
        else:
            assert self.tables.pool.free_count == free

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), extra=st.lists(st.integers(0, 1), max_size=5), kept=st.integers(0, 5))
    def decode(self, data: st.DataObject, extra: list[int], kept: int) -> None:
        """Room for drafts, some of which stay; what is computed is written and published."""
        lane = data.draw(st.sampled_from(sorted(self.texts)))
        tokens = self.texts[lane]
        extra = extra[: LONGEST - len(tokens)]
        if not self.tables.try_grow(lane, len(tokens) + len(extra)):
            return
        for end in range(self.computed[lane] + 1, len(tokens) + len(extra) + 1):
            if end % SIZE == 0:
                self.content[self.tables.blocks(lane)[end // SIZE - 1]] = tuple([*tokens, *extra][:end])
        tokens += extra[:kept]
        self.computed[lane] = len(tokens)
        self.tables.publish(lane, np.array(tokens, dtype=np.int32), len(tokens))
        self.tables.shrink(lane, len(tokens))
        assert len(self.tables.blocks(lane)) == -(-len(tokens) // SIZE)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.texts)))
        self.tables.close(lane)
        del self.texts[lane], self.computed[lane]

    @invariant()
    def books_are_right(self) -> None:
        self.tables.verify_integrity()
        used = {block for lane in self.texts for block in self.tables.blocks(lane)}
        assert self.tables.pool.free_count == BLOCKS - len(used)
        for lane, tokens in self.texts.items():
            for i, block in enumerate(self.tables.blocks(lane)[: self.computed[lane] // SIZE]):
                assert self.content[block] == tuple(tokens[: (i + 1) * SIZE])


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=25)
