"""The numba kernels against the plain PyTorch reference, and bitwise against themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from dynaspec.model.attention.base import AttentionSpec
from dynaspec.model.attention.cpu import CpuAttention
from dynaspec.model.attention.reference import ReferenceAttention
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.kernels.paged_attention import KEYS, Work, load_bfloat16, next_page
from support.attention_cases import AttentionCase, run_case

CPU = torch.device("cpu")
BFLOAT16 = torch.bfloat16
KEPT = [torch.float32, BFLOAT16]
"""Dtypes of caches."""


@dataclass
class Case:
    """A pass over sequences with some context, and the keys and values of all their tokens."""

    spec: AttentionSpec
    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    past: list[tuple[torch.Tensor, torch.Tensor]]

    def run(
        self,
        backend: CpuAttention | ReferenceAttention,
        window: int | None = None,
        kept: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Result of the pass on a cache of a dtype, which is NaN wherever nothing was written."""
        blocks = int(self.batch.block_tables.max()) + 1
        shapes = backend.kv_shape(blocks)
        kv = (torch.full(shapes[0], torch.nan, dtype=kept), torch.full(shapes[1], torch.nan, dtype=kept))
        for s, (k, v) in enumerate(self.past):
            if len(k):
                self._fill(backend, kv, s, k, v)
        return backend.attend(self.q, self.k, self.v, kv, backend.prepare(self.batch), window)

    def _fill(
        self,
        backend: CpuAttention | ReferenceAttention,
        kv: tuple[torch.Tensor, torch.Tensor],
        s: int,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Writes a sequence's context, as a pass of its own would."""
        table = self.batch.block_tables[s : s + 1]
        batch = chain_batch([0], [len(k)], table)
        q = torch.zeros(len(k), self.spec.num_heads, self.spec.head_dim)
        backend.attend(q, k, v, kv, backend.prepare(batch), None)


def slots_of(table: np.ndarray, at: np.ndarray) -> np.ndarray:
    return table[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE


def chain_batch(contexts: list[int], rows: list[int], tables: np.ndarray) -> ForwardBatch:
    at = [context + np.arange(count) for context, count in zip(contexts, rows, strict=True)]
    return ForwardBatch(
        tokens=torch.zeros(sum(rows), dtype=torch.int64),
        positions=np.concatenate(at).astype(np.int64),
        slots=np.concatenate([slots_of(table, where) for table, where in zip(tables, at, strict=True)]),
        query_start=np.cumsum([0, *rows], dtype=np.int32),
        context_lens=np.array(contexts, np.int32),
        block_tables=tables,
    )


def make(
    contexts: list[int], rows: list[int], *, heads: int = 4, kv_heads: int = 2, dim: int = 32, cap: float | None = None
) -> Case:
    generator = torch.Generator().manual_seed(0)
    per = max(-(-(c + r) // BLOCK_SIZE) for c, r in zip(contexts, rows, strict=True))
    tables = np.random.default_rng(0).permutation(len(rows) * per).astype(np.int32).reshape(len(rows), per)

    def random(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width, dim, generator=generator)

    return Case(
        spec=AttentionSpec(heads, kv_heads, dim, dim**-0.5, cap),
        batch=chain_batch(contexts, rows, tables),
        q=random(sum(rows), heads),
        k=random(sum(rows), kv_heads),
        v=random(sum(rows), kv_heads),
        past=[(random(c, kv_heads), random(c, kv_heads)) for c in contexts],
    )


def as_tree(case: Case, parents: list[int]) -> Case:
    """The rows of a single sequence become a tree: ``parents[i]`` is row i's parent, −1 the context."""
    bits, depth = [], []
    for row, parent in enumerate(parents):
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << row)
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    positions = int(case.batch.context_lens[0]) + np.array(depth, np.int64)
    return replace(case, batch=replace(case.batch, positions=positions, ancestors=np.array(bits, np.int64)))


def check(case: Case, window: int | None = None, rows: list[int] | slice = slice(None)) -> None:
    found = case.run(CpuAttention(case.spec, 1), window)
    expected = case.run(ReferenceAttention(case.spec, CPU), window)
    torch.testing.assert_close(found[rows], expected[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_matches_reference_for_head_counts_and_sizes(heads: int, kv_heads: int, dim: int) -> None:
    check(make([0, 5, 16, 37], [3, 1, 18, 2], heads=heads, kv_heads=kv_heads, dim=dim))


@pytest.mark.parametrize("window", [1, 7, 16, 33])
def test_sliding_window(window: int) -> None:
    check(make([0, 40, 15, 64], [35, 1, 4, 20]), window)


@pytest.mark.parametrize("window", [None, 16])
def test_the_first_keys_may_be_hidden(window: int | None) -> None:
    case = AttentionCase(contexts=(30, 1, 17, 33), rows=(4, 1, 20, 70), hidden_keys=1, window=window)
    plain = replace(case, hidden_keys=0)
    found, after = run_case(case, CpuAttention(case.spec, 2))
    expected, expected_after = run_case(case, ReferenceAttention(case.spec, torch.device("cpu")))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after, expected_after, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[:4], run_case(plain, CpuAttention(plain.spec, 2))[0][:4]) or window is not None


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_cache_in_bfloat16_is_given_is_rounded_to_nearest(window: int | None, threads: int) -> None:
    case = make([0, 5, 16, 700], [3, 1, 18, 2], dim=24)
    case.k[1, 0, 0], case.v[3, 1, 2] = 1 + 2**-8, 1 + 3 * 2**-8  # ties, which go to even
    rounded = replace(case, k=_rounded(case.k), v=_rounded(case.v))
    rounded = replace(rounded, past=[(_rounded(k), _rounded(v)) for k, v in case.past])
    found, expected = (some.run(CpuAttention(case.spec, threads), window, BFLOAT16) for some in (case, rounded))
    assert torch.equal(found, expected)
    check_bfloat16(case, threads, window)


@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("context", "rows"), [(0, 600), (700, 30), (KEYS - 3, 9), (2 * KEYS, 70)])
def test_many_rows_read_a_cache_in_bfloat16(context: int, rows: int, threads: int, window: int | None) -> None:
    check_bfloat16(make([context, 40], [rows, 1], heads=6), threads, window)


@pytest.mark.parametrize("dim", [8, 24, 33, 64, 80])
@pytest.mark.parametrize("heads", [2, 6])
def test_heads_of_any_size_read_a_cache_in_bfloat16(dim: int, heads: int) -> None:
    check_bfloat16(make([KEYS - 3, 0, 17], [5, 40, 1], heads=heads, dim=dim), 2)


def test_a_tree_of_many_rows_reads_a_cache_in_bfloat16() -> None:
    check_bfloat16(as_tree(make([KEYS - 7], [24]), [-1, *(row // 2 for row in range(23))]), 2)


@pytest.mark.parametrize("window", [None, 6, 20])
def test_rows_without_slot_and_behind_gaps_with_a_cache_in_bfloat16(window: int | None) -> None:
    case = make([10, 0, 33, 16, 31], [4, 3, 5, 1, 1])
    case.batch.slots[[1, 4, 6, 9, 12]] = -1  # row 4 is the first of a sequence without context: it sees nothing
    case.batch.positions[12:] += 3
    check_bfloat16(case, 2, window)


@pytest.mark.parametrize("window", [None, 3, 20])
def test_trees_with_a_cache_in_bfloat16(window: int | None) -> None:
    check_bfloat16(as_tree(make([29], [7]), [-1, 0, 0, 1, 2, 2, 4]), 1, window)


@pytest.mark.parametrize("window", [None, 16])
def test_capped_scores_and_hidden_keys_with_a_cache_in_bfloat16(window: int | None) -> None:
    case = make([20, 3, KEYS + 5], [4, 9, 30], cap=0.5)
    check_bfloat16(replace(case, spec=replace(case.spec, hidden_keys=1)), 2, window)


def check_bfloat16(case: Case, threads: int, window: int | None = None) -> None:
    """Keys, values, queries and the weights of values are rounded to bfloat16, sums are float32.

    A weight whose last bits differ may be rounded to another neighbour, so that single results differ by more.
    """
    found = case.run(CpuAttention(case.spec, threads), window, BFLOAT16)
    difference = (found - rounded_attention(case, window)).abs()
    assert difference.median() < 1e-6
    assert difference.max() < 2**-7
    exact = case.run(CpuAttention(case.spec, threads), window)
    assert (found - exact).abs().median() > 1e-4
    assert torch.equal(found, one_by_one(case, window))


def rounded_attention(case: Case, window: int | None) -> torch.Tensor:
    """Attention of every row by itself in float64, with what is rounded rounded."""
    batch, spec, rows = case.batch, case.spec, []
    for s, (past_k, past_v) in enumerate(case.past):
        begin, end = int(batch.query_start[s]), int(batch.query_start[s + 1])
        k, v = (_rounded(torch.cat(both)) for both in ((past_k, case.k[begin:end]), (past_v, case.v[begin:end])))
        for row in range(begin, end):
            inner = torch.from_numpy(np.flatnonzero(batch.slots[begin : row + 1] >= 0))
            if batch.ancestors is not None and batch.ancestors[row] != -1:
                inner = inner[[bool(int(batch.ancestors[row]) >> int(i) & 1) for i in inner]]
            seen = torch.cat([torch.arange(len(past_k)), len(past_k) + inner])
            positions = torch.cat([torch.arange(len(past_k)), torch.from_numpy(batch.positions)[begin + inner]])
            visible = seen >= spec.hidden_keys
            if window is not None:
                visible &= positions > int(batch.positions[row]) - window
            q = _rounded(case.q[row] * torch.tensor(spec.scale, dtype=torch.float32)).double()
            group = spec.num_heads // spec.num_kv_heads
            keys, values = (x[seen].double().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("hd,nhd->hn", q, keys)
            if spec.softcap is not None:
                scores = torch.tanh(scores / spec.softcap) * spec.softcap
            scores = scores.masked_fill(~visible, -torch.inf)
            total = torch.zeros(spec.num_heads, 1, dtype=torch.float64)
            peak = torch.full_like(total, -1e300)
            result = torch.zeros(spec.num_heads, spec.head_dim, dtype=torch.float64)
            for block in range(0, len(seen), KEYS):
                some = slice(block, block + KEYS)
                if not visible[some].any():
                    continue
                top = scores[:, some].amax(1, keepdim=True)
                weights = torch.exp((scores[:, some] - top).float())
                both = torch.maximum(peak, top)
                keep, add = torch.exp(peak - both), torch.exp(top - both)
                total = total * keep + weights.double().sum(1, keepdim=True) * add
                result = result * keep + torch.einsum("hn,nhd->hd", _rounded(weights).double(), values[some]) * add
                peak = both
            rows.append((result / total.clamp(min=1e-300)).reshape(-1))
    return torch.stack(rows).float()


def one_by_one(case: Case, window: int | None) -> torch.Tensor:
    """The same kernels without dot products, as on processors that have none."""
    load_bfloat16("i2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "dynaspec.model.attention.cpu._arrays", lambda kv: tuple(one.view(torch.int16).numpy() for one in kv)
        )
        return case.run(CpuAttention(case.spec, 1), window, BFLOAT16)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def test_softcap() -> None:
    case = make([20, 3], [4, 9], cap=0.5)
    uncapped = replace(case, spec=replace(case.spec, softcap=None)).run(
        CpuAttention(replace(case.spec, softcap=None), 1)
    )
    check(case)
    assert not torch.allclose(case.run(CpuAttention(case.spec, 1)), uncapped, atol=1e-2)


@pytest.mark.parametrize("window", [None, 3, 20])
def test_tree(window: int | None) -> None:
    check(as_tree(make([29], [7]), [-1, 0, 0, 1, 2, 2, 4]), window)


def test_rows_without_slot_are_seen_by_nobody() -> None:
    case = make([10, 0, 33], [4, 3, 5])
    case.batch.slots[[1, 4, 6, 9, 11]] = -1  # row 4 is the first of a sequence without context: it sees nothing
    check(case)
    assert not case.run(CpuAttention(case.spec, 1))[4].any()


@pytest.mark.parametrize("window", [None, 6, 20])
def test_single_rows_without_slot_or_behind_a_gap(window: int | None) -> None:
    """Drafting with gated KV: one row a sequence, whose position is ahead of its place in the KV."""
    case = make([10, 0, 33, 16, 31], [1] * 5)
    case.batch.slots[[0, 1, 3]] = -1
    case.batch.positions += np.array([0, 3, 2, 5, 1])
    check(case, window)


def test_tree_with_a_row_without_slot() -> None:
    case = as_tree(make([18], [6]), [-1, 0, 0, 1, 2, 4])
    case.batch.slots[3] = -1
    check(case, rows=[0, 1, 2, 4, 5])


@pytest.mark.parametrize("kept", KEPT)
def test_path_of_a_tree_has_the_bits_of_the_chain(kept: torch.dtype) -> None:
    tree = as_tree(make([29], [7]), [-1, 0, 0, 1, 2, 2, 5])
    path = [0, 2, 5, 6]
    chain = make([29], [4])
    chain = replace(chain, q=tree.q[path], k=tree.k[path], v=tree.v[path], past=tree.past)
    for window in (None, 3, 20):
        in_tree = tree.run(CpuAttention(tree.spec, 1), window, kept)[path]
        assert torch.equal(in_tree, chain.run(CpuAttention(chain.spec, 1), window, kept))


@pytest.mark.parametrize("window", [None, 300])
def test_contexts_of_many_blocks_of_keys(window: int | None) -> None:
    check(make([KEYS - 1, 3 * KEYS, 5 * KEYS - 3, 0], [2, 1, 6, KEYS + 40]), window)


@pytest.mark.parametrize("context", [KEYS - 5, KEYS - 1, 3 * KEYS - 3])
@pytest.mark.parametrize("window", [None, 3, KEYS])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kept", KEPT)
def test_path_of_a_tree_across_blocks_of_keys_has_the_bits_of_the_chain(
    context: int, window: int | None, threads: int, kept: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynaspec.model.attention.cpu._TEAM_WORK", 0)
    tree = as_tree(make([context], [12]), [-1, 0, 0, 1, 2, 2, 5, 6, 7, 8, 9, 10])
    check(tree, window)
    path = [0, 2, 5, 6, 7, 8, 9, 10, 11]
    chain = make([context], [9])
    chain = replace(chain, q=tree.q[path], k=tree.k[path], v=tree.v[path], past=tree.past)
    in_tree = tree.run(CpuAttention(tree.spec, threads), window, kept)[path]
    assert torch.equal(in_tree, chain.run(CpuAttention(chain.spec, 1), window, kept))


@pytest.mark.parametrize("window", [None, 2 * KEYS])
@pytest.mark.parametrize(
    ("contexts", "rows"), [([20 * KEYS], [1]), ([3 * KEYS - 2, 5, 9 * KEYS, 0], [4, 1, 8, 3]), ([6 * KEYS], [70])]
)
@pytest.mark.parametrize("kept", KEPT)
def test_keys_shared_out_over_threads_change_no_bit(
    contexts: list[int], rows: list[int], window: int | None, kept: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynaspec.model.attention.cpu._TEAM_WORK", 0)
    monkeypatch.setattr("dynaspec.model.attention.cpu.team_size", lambda threads: threads)
    case = make(contexts, rows)
    expected = case.run(CpuAttention(case.spec, 1), window, kept)
    for threads in (2, 3, 8):
        assert torch.equal(case.run(CpuAttention(case.spec, threads), window, kept), expected)


@pytest.mark.parametrize("kept", KEPT)
def test_a_row_has_the_same_bits_alone_and_in_a_prefill(kept: torch.dtype) -> None:
    case = make([0], [2 * KEYS + 9])
    whole = case.run(CpuAttention(case.spec, 1), kept=kept)
    last = make([2 * KEYS + 8], [1])
    last = replace(last, q=case.q[-1:], k=case.k[-1:], v=case.v[-1:], past=[(case.k[:-1], case.v[:-1])])
    assert torch.equal(last.run(CpuAttention(case.spec, 1), kept=kept), whole[-1:])


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kept", KEPT)
def test_threads_and_neighbours_change_no_bit(
    window: int | None, kept: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynaspec.model.attention.cpu._TEAM_WORK", 0)
    case = make([37, 0, 100, 16], [5, 40, 1, 17])
    together = case.run(CpuAttention(case.spec, 1), window, kept)
    for threads in (2, 3, 7):
        assert torch.equal(case.run(CpuAttention(case.spec, threads), window, kept), together)
    for s in range(4):
        begin, end = case.batch.query_start[s : s + 2]
        rows = slice(int(begin), int(end))
        batch = chain_batch([int(case.batch.context_lens[s])], [int(end - begin)], case.batch.block_tables[s : s + 1])
        alone = Case(case.spec, batch, case.q[rows], case.k[rows], case.v[rows], case.past[s : s + 1])
        assert torch.equal(alone.run(CpuAttention(case.spec, 2), window, kept), together[rows])


def test_strided_views_are_read_right() -> None:
    case = make([20], [6])
    fused = torch.cat([case.q, case.k, case.v], 1)
    q, k, v = torch.split(fused, [4, 2, 2], 1)
    tables = np.pad(case.batch.block_tables, ((0, 0), (0, 3)), constant_values=-1)[:, :-3]
    views = replace(case, q=q, k=k, v=v, batch=replace(case.batch, block_tables=tables))
    assert torch.equal(views.run(CpuAttention(case.spec, 1)), case.run(CpuAttention(case.spec, 1)))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    case = make([40], [3])
    check(replace(case, q=case.q * 200))


@pytest.mark.parametrize("window", [0, 20])
def test_what_is_fetched_is_what_is_read_next(window: int) -> None:
    """Pages in the order in which a thread reads them, of two heads, blocks of keys and three sequences."""
    case = make([KEYS + 20, 3, 40], [1, 2, 1])
    meta = CpuAttention(case.spec, 1).prepare(case.batch)
    units, bounds, kept, *rows = meta.work
    nothing = np.empty((0, 0), np.float32)
    arrays = nothing[None], *(np.empty((0, 2, 0, 0), np.float32),) * 2, nothing, nothing, units, bounds, kept
    work = Work(*arrays, *rows, 1.0, 0.0, window, 0)
    pages = {0: range(257 // 16 if window else 0, 18), 1: range(1), 2: range(21 // 16 if window else 0, 3)}
    expected = [(s, head, page) for s in pages for head in range(2) for page in pages[s]]
    number, page, found = 0, pages[0][0], [(0, 0, pages[0][0])]
    while True:
        number, page = next_page(number, page, bounds[-1], 2, work)
        if number == bounds[-1]:
            break
        found.append((units[number // 2, 0], number % 2, page))
    assert found == expected
