from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dynaspec.contract.proposer import Drafts
from dynaspec.engine.layout import lay_out
from dynaspec.schedule.batch import Chunk, StepBatch
from unit.engine.fakes import request

BLOCK = 4


def step(lengths: list[int], chunks: list[tuple[int, int, int, bool]]) -> StepBatch:
    """Decoding requests on lanes 0, 1, …; chunks are (lane, start, count, completes). Token p of lane l is 10 l + p."""
    size = len(lengths)
    return StepBatch(
        step=1,
        requests=tuple(request(f"r{i}", [1]) for i in range(size)),
        lanes=np.arange(size, dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int64),
        room=np.full(size, 9, dtype=np.int64),
        tokens=(10 * np.arange(4)[:, None] + np.arange(20)).astype(np.int32),
        block_tables=np.arange(20, dtype=np.int32).reshape(4, 5),
        chunks=[Chunk(request(f"c{lane}", [1]), lane, start, n, done) for lane, start, n, done in chunks],
        waiting=0,
    )


def drafts(*rows: list[int], width: int = 3) -> Drafts:
    tokens = np.array([[*row, *[0] * (width - len(row))] for row in rows], dtype=np.int64).reshape(len(rows), width)
    return Drafts(tokens=tokens, lens=np.array([len(row) for row in rows], dtype=np.int64))


def test_decoding_rows_come_first_then_chunks() -> None:
    batch = step([5, 3], [(2, 4, 3, False), (3, 0, 2, True)])
    proposed = drafts([91, 92], [])
    layout = lay_out(batch, proposed, proposed.lens, BLOCK)
    assert layout.rows.lanes.tolist() == [0, 0, 0, 1, 2, 2, 2, 3, 3]
    assert layout.rows.positions.tolist() == [4, 5, 6, 2, 4, 5, 6, 0, 1]
    assert layout.starts.tolist() == [4, 2, 4, 0]
    assert np.diff(layout.rows.query_start).tolist() == [3, 1, 3, 2]
    assert layout.decode_rows == 4
    forward = layout.forward_batch(torch.device("cpu"))
    assert forward.tokens.tolist() == [4, 91, 92, 12, 24, 25, 26, 30, 31]
    assert forward.context_lens.tolist() == [4, 2, 4, 0]
    assert forward.query_start.tolist() == [0, 3, 4, 7, 9]


def test_all_decoding_rows_are_sampled_and_the_last_of_completing_chunks() -> None:
    batch = step([5, 3], [(2, 4, 3, False), (3, 0, 2, True)])
    proposed = drafts([91, 92], [])
    layout = lay_out(batch, proposed, proposed.lens, BLOCK)
    assert layout.kv_only.tolist() == [0, 0, 3, 1]
    assert layout.sampled_at.tolist() == [0, 1, 2, 3, 4]
    assert layout.sampled.lanes.tolist() == [0, 0, 0, 1, 3]
    assert layout.sampled.request.tolist() == [0, 0, 0, 1, 2]
    assert layout.sampled.depth.tolist() == [0, 1, 2, 0, 0]
    assert layout.drafts.tokens.tolist() == [[91, 92, 0], [0, 0, 0], [0, 0, 0]]
    assert layout.drafts.lens.tolist() == [2, 0, 0]


def test_a_trimmed_draft_is_cut_in_rows_too() -> None:
    batch = step([5], [])
    layout = lay_out(batch, drafts([91, 92, 93]), np.array([1]), BLOCK)
    assert np.diff(layout.rows.query_start).tolist() == [2]
    assert layout.drafts.lens.tolist() == [1]
    assert batch.tokens[0, 4:8].tolist() == [4, 91, 6, 7]


def test_prefill_alone() -> None:
    layout = lay_out(step([], [(1, 0, 3, False)]), drafts(width=0), np.zeros(0, dtype=np.int64), BLOCK)
    assert (layout.decode_rows, layout.sampled_at.size) == (0, 0)
    layout = lay_out(step([], [(1, 0, 3, True)]), drafts(width=0), np.zeros(0, dtype=np.int64), BLOCK)
    assert (layout.sampled_at.tolist(), layout.sampled.depth.tolist()) == ([0], [0])


def test_all_rows_of_a_prompt_are_read_where_their_log_probabilities_are_wanted() -> None:
    batch = step([5], [(1, 0, 3, False), (2, 0, 4, True), (3, 0, 2, True)])
    batch.chunks[1] = replace(batch.chunks[1], request=request("logprobs", [1], prompt_logprobs=1))
    layout = lay_out(batch, drafts([91]), np.array([1]), BLOCK)
    assert layout.kv_only.tolist() == [0, 3, 0, 1]
    assert layout.sampled_at.tolist() == [0, 1, 5, 6]
    assert [layout.first_read(run) for run in range(4)] == [0, 2, 2, 6]
