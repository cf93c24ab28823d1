"""Random passes for paged attention, run through the public protocol so that no cache layout matters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from dynaspec.model.attention.base import AttentionBackend, AttentionSpec
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch


@dataclass(frozen=True)
class AttentionCase:
    """A prefill of every context, then the pass under test."""

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    heads: tuple[int, int, int] = (4, 2, 32)
    """Query heads, KV heads, head dimension."""
    tree: bool = False
    padded: float = 0.0
    """Share of rows with slot −1."""
    window: int | None = None
    softcap: float | None = None
    hidden_keys: int = 0
    """At most the shortest context."""
    seed: int = 0

    @property
    def spec(self) -> AttentionSpec:
        heads, kv_heads, dim = self.heads
        return AttentionSpec(heads, kv_heads, dim, scale=dim**-0.5, softcap=self.softcap, hidden_keys=self.hidden_keys)

    def __str__(self) -> str:
        contexts, rows = (",".join(map(str, column[:4])) for column in (self.contexts, self.rows))
        options = {"tree": self.tree, "pad": self.padded, "window": self.window, "cap": self.softcap}
        options["hidden"] = self.hidden_keys
        extras = "".join(f" {name}={value}" for name, value in options.items() if value)
        return f"ctx={contexts} rows={rows} heads={'x'.join(map(str, self.heads))}{extras}"

    def batch(self, contexts: tuple[int, ...], device: str = "cpu") -> ForwardBatch:
        """The pass under test, were its contexts these."""
        tables = _block_tables(replace(self, contexts=contexts), np.random.default_rng(self.seed))
        return _batch(np.array(contexts), np.array(self.rows), tables, device)


def run_case(
    case: AttentionCase,
    backend: AttentionBackend,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    broken_row: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the pass under test, and of one more row a sequence after it, which shows what was written.

    Both are [rows, heads · dim], float32, on the CPU. ``broken_row`` has values that are NaN.
    """
    rng = np.random.default_rng(case.seed)
    tables = _block_tables(case, rng)
    shapes = backend.kv_shape(int(tables.max()) + 1)
    kv = tuple(torch.full(shape, float("nan"), dtype=dtype, device=device) for shape in shapes)
    nothing = np.zeros(len(case.contexts), dtype=np.int32)
    contexts = np.array(case.contexts, dtype=np.int32)
    rows = np.array(case.rows, dtype=np.int32)

    prefill = _batch(nothing, contexts, tables, device)
    if prefill.rows:
        _attend(case, backend, prefill, kv, rng, device, dtype)
    tested = _batch(contexts, rows, tables, device)
    if case.tree:
        tested.ancestors = _random_trees(tested, rng)
    padding = rng.random(tested.rows) < case.padded
    tested.slots[padding] = -1
    out = _attend(case, backend, tested, kv, rng, device, dtype, broken_row)

    kept = contexts + np.array([_leading(~padding[a:b]) for a, b in _spans(tested)], dtype=np.int32)
    after = _attend(case, backend, _batch(kept, np.ones_like(rows), tables, device), kv, rng, device, dtype)
    return out, after


def _block_tables(case: AttentionCase, rng: np.random.Generator) -> np.ndarray:
    """Scattered blocks, room for one row more, and block 0 wherever a table ends."""
    need = [-(-(c + r + 1) // BLOCK_SIZE) for c, r in zip(case.contexts, case.rows, strict=True)]
    pool = rng.permutation(np.arange(1, sum(need) + 1, dtype=np.int32))
    tables = np.zeros((len(need), max(need) + 1), dtype=np.int32)
    for table, blocks, end in zip(tables, need, np.cumsum(need), strict=True):
        table[:blocks] = pool[end - blocks : end]
    return tables


def _batch(contexts: np.ndarray, rows: np.ndarray, tables: np.ndarray, device: str) -> ForwardBatch:
    start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    sequence = np.repeat(np.arange(len(rows)), rows)
    index = np.arange(len(sequence)) - start[sequence] + contexts[sequence]
    slots = tables[sequence, index // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + index % BLOCK_SIZE
    tokens = torch.zeros(len(sequence), dtype=torch.int64, device=device)
    return ForwardBatch(tokens, index.astype(np.int64), slots, start, contexts.astype(np.int32), tables)


def _spans(batch: ForwardBatch) -> list[tuple[int, int]]:
    return list(pairwise(batch.query_start.tolist()))


def _random_trees(batch: ForwardBatch, rng: np.random.Generator) -> np.ndarray:
    """Bit sets of trees in which every node's parent is an earlier row; positions become context + depth."""
    bits = np.zeros(batch.rows, dtype=np.uint64)
    for begin, end in _spans(batch):
        for row in range(end - begin):
            parent = begin + int(rng.integers(0, row)) if row else None
            inherited = bits[parent] if parent is not None else np.uint64(0)
            bits[begin + row] = inherited | np.uint64(1 << row)
            if parent is not None:
                batch.positions[begin + row] = batch.positions[parent] + 1
    return bits.view(np.int64)


def _leading(kept: np.ndarray) -> int:
    """Rows before the first padding."""
    return int(kept.argmin()) if not kept.all() else len(kept)


def _attend(
    case: AttentionCase,
    backend: AttentionBackend,
    batch: ForwardBatch,
    kv: tuple[torch.Tensor, ...],
    rng: np.random.Generator,
    device: str,
    dtype: torch.dtype,
    broken_row: int | None = None,
) -> torch.Tensor:
    """One layer on random projections, which are views of one fused tensor as in a decoder."""
    heads, kv_heads, dim = case.heads
    fused = rng.standard_normal((batch.rows, heads + 2 * kv_heads, dim), dtype=np.float32)
    if broken_row is not None:
        fused[broken_row, heads + kv_heads :] = np.nan
    q, k, v = torch.from_numpy(fused).to(device, dtype).split([heads, kv_heads, kv_heads], dim=1)
    out = backend.attend(q, k, v, kv, backend.prepare(batch), case.window)  # type: ignore[arg-type]
    return out.float().cpu()
