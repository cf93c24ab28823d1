"""How the work of attention is split: a plan's tiles and the threads' shares of them."""

from __future__ import annotations

import numpy as np
import pytest

from dynaspec.model.batch import NO_ANCESTORS
from dynaspec.model.kernels.attention_tile import TILE
from dynaspec.model.kernels.attention_work import plan_work

KV_HEADS = 3


def tiles_of(rows: int, group: int, threads: int) -> list[list[int]]:
    """Of one request with 256 keys before its rows: each thread's works, in tiles."""
    start, context = np.array([0, rows], np.int32), np.array([256], np.int32)
    positions = np.arange(256, 256 + rows)
    units, _, bounds, _ = plan_work(
        start, context, positions, positions, NO_ANCESTORS, group * KV_HEADS, KV_HEADS, threads, 1
    )
    works = [-(-(end - first) * group // TILE) for _, first, end, _, _ in units.tolist() for _ in range(KV_HEADS)]
    return [works[begin:end] for begin, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False)]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_tiles_are_filled(group: int, threads: int) -> None:
    for rows in range(1, 17):
        assert sum(map(sum, tiles_of(rows, group, threads))) == KV_HEADS * -(-rows * group // TILE)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("threads", [2, 4])
def test_threads_have_as_much_to_do_but_for_one_work(group: int, threads: int) -> None:
    for rows in range(1, 17):
        shares = tiles_of(rows, group, threads)
        mean = sum(map(sum, shares)) / threads
        largest = max(max(share, default=0) for share in shares)
        assert all(abs(sum(share) - mean) <= largest for share in shares), (rows, shares)
