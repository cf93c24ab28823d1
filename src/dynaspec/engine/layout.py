"""Which rows a target pass has, and which of them are sampled from.

Compiled: some thirty calls of numpy between two passes, each fetched from memory anew, take as long as a small pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.compiled import copy_row, kernel
from dynaspec.contract.proposer import Drafts, Ints
from dynaspec.kv.rows import RaggedRows, fill_rows, tokens_at
from dynaspec.model.batch import ForwardBatch
from dynaspec.sampling.ops import Rows
from dynaspec.schedule.batch import Chunk, StepBatch
from dynaspec.verify.tree import DraftTrees

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class PassLayout:
    """Runs of consecutive tokens: first the decoding requests', then the prefill chunks'."""

    lanes: Ints
    """[S]"""
    starts: Ints
    """[S] KV entries before each run."""
    rows: RaggedRows
    tokens: Ints
    """[R] token ids of all rows."""
    decode_rows: int
    """Rows of decoding requests; they come first."""
    sampled: Rows
    """The rows that give tokens: all of decoding requests, the last of chunks that complete."""
    sampled_at: Ints
    """[sampled rows] their places among the rows that are read."""
    kv_only: Int32
    """[S] see ``ForwardBatch``: of chunks, all rows whose output nobody asked for; empty without chunks."""
    drafts: Drafts
    """Drafts with a row of length 0 for each completing chunk."""
    trees: DraftTrees | None = None
    """The same, where some are trees; ``sampled`` then has a row of drafted tokens for each of its rows."""
    ancestors: Ints | None = None
    """[R] see ``ForwardBatch``."""

    def forward_batch(self, device: torch.device) -> ForwardBatch:
        return ForwardBatch(
            tokens=torch.from_numpy(self.tokens).to(device),
            positions=self.rows.positions,
            slots=self.rows.slots,
            query_start=self.rows.query_start,
            context_lens=self.starts.astype(np.int32),
            block_tables=self.rows.block_tables,
            ancestors=self.ancestors,
            kv_only=self.kv_only if self.kv_only.size else None,
        )

    def first_read(self, run: int) -> int:
        """The place of a run's first row among those that are read."""
        return int(self.rows.query_start[run] - self.kv_only[:run].sum())


def lay_out(batch: StepBatch, drafts: Drafts, lens: Ints, block_size: int) -> PassLayout:
    """Rows for each request's last committed token and its first ``lens`` drafts, and for the chunks.

    A tree's nodes are rows like a chain's tokens, with KV slots one behind the other; positions and what each sees are
    those of its path.

    Writes the drafts behind the committed tokens of their lanes, where nothing is defined, so that one gather reads
    committed and drafted tokens alike.
    """
    lanes, starts, rows, tokens, decode_rows, sampled_at, kv_only, sampled, padded, padded_lens = fill_layout(
        batch.tokens,
        batch.block_tables,
        block_size,
        batch.lanes,
        batch.lengths,
        np.ascontiguousarray(drafts.tokens),
        lens,
        _columns(batch.chunks),
    )
    layout = PassLayout(
        lanes=lanes,
        starts=starts,
        rows=RaggedRows(*rows),
        tokens=tokens,
        decode_rows=decode_rows,
        sampled=Rows(*sampled, padded),
        sampled_at=sampled_at,
        kv_only=kv_only,
        drafts=replace(drafts, tokens=padded, lens=padded_lens),
    )
    if drafts.parents is not None:
        _branch(layout, drafts.parents)
    return layout


def _branch(layout: PassLayout, parents: Ints) -> None:
    """Makes trees of what was laid out as chains, by the ``parents`` [B, N] of their nodes."""
    drafts, sampled = layout.drafts, layout.sampled
    of_all = np.full(drafts.tokens.shape, -1, np.int64)
    of_all[: len(parents)] = parents
    roots, ancestors, depth, paths = grow_rows(
        layout.rows.positions, sampled.request, sampled.depth, drafts.tokens, of_all, drafts.lens, layout.decode_rows
    )
    layout.ancestors = ancestors
    layout.trees = DraftTrees(roots, drafts.tokens, of_all, drafts.lens)
    layout.sampled = Rows(sampled.lanes, np.arange(depth.size), depth, paths)


@kernel
def grow_rows(
    positions: Ints, request: Ints, depth: Ints, tokens: Ints, parents: Ints, lens: Ints, decode_rows: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Roots and ancestors; of the sampled rows, depth and drafted tokens before each. Corrects ``positions`` [R].

    Args:
        request, depth: [sampled rows] as for chains.
        tokens, parents: [B, N], of which ``lens`` [B] count.
        decode_rows: the first rows of the pass, all sampled, to which nodes belong.
    """
    roots, ancestors = np.empty(lens.size, np.int64), np.full(positions.size, -1, np.int64)
    own, deepest = np.zeros(depth.size, np.int64), 0
    for row in range(depth.size):
        r, node = request[row], depth[row] - 1
        if node < 0:
            roots[r] = row
            if row < decode_rows and lens[r]:
                ancestors[row] = 1
            continue
        above = roots[r] + 1 + parents[r, node]
        own[row] = own[above] + 1
        positions[row] = positions[roots[r]] + own[row]
        ancestors[row] = ancestors[above] | (np.int64(1) << (node + 1))
        deepest = max(deepest, own[row])
    paths = np.zeros((depth.size, deepest), np.int64)
    for row in range(depth.size):
        r, node = request[row], depth[row] - 1
        if node >= 0:
            above = roots[r] + 1 + parents[r, node]
            copy_row(paths[above], paths[row])
            paths[row, own[row] - 1] = tokens[r, node]
    return roots, ancestors, own, paths


_NO_CHUNKS: Ints = np.zeros((0, 5), np.int64)


def _columns(chunks: list[Chunk]) -> Ints:
    """[chunks, 5] lane, start, count, whether it completes, rows that are read."""
    if not chunks:
        return _NO_CHUNKS
    columns = [
        (c.lane, c.start, c.count, c.completes, c.completes if c.request.params.prompt_logprobs is None else c.count)
        for c in chunks
    ]
    return np.array(columns, np.int64)


@kernel
def fill_layout(
    texts: Int32,
    tables: Int32,
    block_size: int,
    decoding: Ints,
    lengths: Ints,
    drafts: Ints,
    lens: Ints,
    chunks: Ints,
) -> tuple[
    Ints,
    Ints,
    tuple[Int32, Ints, Ints, Ints, Int32],
    Ints,
    int,
    Ints,
    Int32,
    tuple[Ints, Ints, Ints],
    Ints,
    Ints,
]:
    """The fields of a ``PassLayout``.

    Args:
        texts: [lanes, max length] tokens of all lanes; gets the drafts.
        tables: [lanes, max blocks]
        decoding: [B] lanes, ``lengths`` [B] their committed tokens.
        drafts: [B, K], of which ``lens`` [B] count.
        chunks: see ``_columns``.
    """
    requests, width = drafts.shape
    runs = requests + chunks.shape[0]
    lanes, starts, counts = np.empty(runs, np.int64), np.empty(runs, np.int64), np.empty(runs, np.int64)
    decode_rows = 0
    for r in range(requests):
        lanes[r], starts[r], counts[r] = decoding[r], lengths[r] - 1, lens[r] + 1
        decode_rows += lens[r] + 1
        for j in range(lens[r]):
            texts[decoding[r], lengths[r] + j] = drafts[r, j]
    completing = 0
    for c in range(chunks.shape[0]):
        lanes[requests + c], starts[requests + c], counts[requests + c] = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        completing += chunks[c, 3]
    rows = fill_rows(tables, block_size, lanes, starts, counts)
    tokens = tokens_at(texts, rows[1], rows[2])
    size = decode_rows + completing
    sampled_at, lane = np.empty(size, np.int64), np.empty(size, np.int64)
    request, depth = np.empty(size, np.int64), np.empty(size, np.int64)
    padded, padded_lens = np.zeros((requests + completing, width), np.int64), np.zeros(requests + completing, np.int64)
    kv_only = np.zeros(runs if chunks.shape[0] else 0, np.int32)
    n = 0
    for r in range(requests):
        copy_row(drafts[r], padded[r])
        padded_lens[r] = lens[r]
        for j in range(lens[r] + 1):
            sampled_at[n], lane[n], request[n], depth[n] = n, decoding[r], r, j
            n += 1
    owner, read = requests, decode_rows
    for c in range(chunks.shape[0]):
        kv_only[requests + c] = chunks[c, 2] - chunks[c, 4]
        read += chunks[c, 4]
        if chunks[c, 3]:
            sampled_at[n], lane[n] = read - 1, chunks[c, 0]
            request[n], depth[n] = owner, 0
            n, owner = n + 1, owner + 1
    return (
        lanes,
        starts,
        rows,
        tokens,
        decode_rows,
        sampled_at,
        kv_only,
        (lane, request, depth),
        padded,
        padded_lens,
    )
