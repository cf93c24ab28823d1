from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.kv.rows import ragged_rows

SIZE = 4
RUNS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 17), st.integers(1, 9)), min_size=1, max_size=6)


@given(runs=RUNS, seed=st.integers(0, 9))
@settings(max_examples=60)
def test_rows_are_those_of_a_slow_loop(runs: list[tuple[int, int, int]], seed: int) -> None:
    tables = np.random.default_rng(seed).permutation(60).reshape(6, 10).astype(np.int32)
    lanes, start, count = (np.array(column, dtype=np.int64) for column in zip(*runs, strict=True))
    rows = ragged_rows(tables, SIZE, lanes, start, count)
    expected = [
        (lane, position, int(tables[lane, position // SIZE]) * SIZE + position % SIZE)
        for lane, first, n in runs
        for position in range(first, first + n)
    ]
    assert list(zip(rows.lanes, rows.positions, rows.slots, strict=True)) == expected
    assert np.diff(rows.query_start).tolist() == count.tolist()
    assert rows.query_start[0] == 0
    longest = max(first + n for _, first, n in runs)
    assert rows.block_tables.tolist() == tables[lanes, : -(-longest // SIZE)].tolist()
    assert (rows.query_start.dtype, rows.slots.dtype, rows.block_tables.dtype) == (np.int32, np.int64, np.int32)


def test_slots_of_large_caches_do_not_overflow() -> None:
    tables = np.array([[2**28]], dtype=np.int32)
    one = np.ones(1, dtype=np.int64)
    assert ragged_rows(tables, 16, 0 * one, 3 * one, one).slots.tolist() == [2**32 + 3]
