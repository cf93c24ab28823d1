"""Which rows a target pass has, and which of them are sampled from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dynaspec.contract.proposer import Drafts, Ints
from dynaspec.kv.rows import RaggedRows, ragged_rows
from dynaspec.model.batch import ForwardBatch
from dynaspec.sampling.rows import Rows
from dynaspec.schedule.batch import StepBatch


@dataclass(slots=True)
class PassLayout:
    """Runs of consecutive tokens: first the decoding requests', then the prefill chunks'."""

    lanes: Ints
    """[S]"""
    starts: Ints
    """[S] KV entries before each run."""
    counts: Ints
    """[S]"""
    rows: RaggedRows
    decode_rows: int
    """Rows of decoding requests; they come first."""
    sampled: Rows
    """The rows that give tokens: all of decoding requests, the last of chunks that complete."""
    sampled_at: Ints
    """[sampled rows] their places in the pass."""
    drafts: Drafts
    """Drafts with a row of length 0 for each completing chunk."""

    def forward_batch(self, batch: StepBatch, device: torch.device) -> ForwardBatch:
        tokens = batch.tokens[self.rows.lanes, self.rows.positions].astype(np.int64)
        return ForwardBatch(
            tokens=torch.from_numpy(tokens).to(device),
            positions=self.rows.positions,
            slots=self.rows.slots,
            query_start=self.rows.query_start,
            context_lens=self.starts.astype(np.int32),
            block_tables=self.rows.block_tables,
        )


def lay_out(batch: StepBatch, drafts: Drafts, lens: Ints, block_size: int) -> PassLayout:
    """Rows for each request's last committed token and its first ``lens`` drafts, and for the chunks.

    Writes the drafts behind the committed tokens of their lanes, where nothing is defined, so that one gather reads
    committed and drafted tokens alike.
    """
    width = drafts.tokens.shape[1]
    request, slot = np.nonzero(np.arange(width) < lens[:, None])
    batch.tokens[batch.lanes[request], batch.lengths[request] + slot] = drafts.tokens[request, slot]
    chunks = batch.chunks
    lanes = np.concatenate([batch.lanes, np.array([c.lane for c in chunks], dtype=np.int64)])
    starts = np.concatenate([batch.lengths - 1, np.array([c.start for c in chunks], dtype=np.int64)])
    counts = np.concatenate([lens + 1, np.array([c.count for c in chunks], dtype=np.int64)])
    rows = ragged_rows(batch.block_tables, block_size, lanes, starts, counts)
    completing = len(batch.requests) + np.flatnonzero([c.completes for c in chunks])
    decode_rows = int(counts[: len(batch.requests)].sum())
    sampled_at = np.concatenate([np.arange(decode_rows), rows.query_start[completing + 1] - 1])
    padded = replace(
        drafts,
        tokens=np.concatenate([drafts.tokens, np.zeros((completing.size, width), dtype=np.int64)]),
        lens=np.concatenate([lens, np.zeros(completing.size, dtype=np.int64)]),
    )
    return PassLayout(
        lanes=lanes,
        starts=starts,
        counts=counts,
        rows=rows,
        decode_rows=decode_rows,
        sampled=_sampled_rows(rows, counts[: len(batch.requests)], sampled_at, padded),
        sampled_at=sampled_at,
        drafts=padded,
    )


def _sampled_rows(rows: RaggedRows, decode_counts: Ints, sampled_at: Ints, drafts: Drafts) -> Rows:
    per_request = np.concatenate([decode_counts, np.ones(len(drafts.lens) - len(decode_counts), dtype=np.int64)])
    first = np.cumsum(per_request) - per_request
    return Rows(
        lanes=rows.lanes[sampled_at],
        request=np.repeat(np.arange(per_request.size), per_request),
        depth=np.arange(sampled_at.size) - np.repeat(first, per_request),
        drafts=drafts.tokens,
    )
