"""KV moved from slot to slot, and passes in which chains and trees meet."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.model.attention.base import AttentionSpec
from dynaspec.model.attention.cpu import CpuAttention
from dynaspec.model.attention.reference import ReferenceAttention
from dynaspec.model.batch import BLOCK_SIZE
from unit.model.attention.test_cpu import KEPT, Case, as_tree, chain_batch, make, slots_of

CPU = torch.device("cpu")
SPEC = AttentionSpec(4, 2, 24, 24**-0.5)


def backends() -> list[Any]:
    found: list[Any] = [CpuAttention(SPEC, 1), ReferenceAttention(SPEC, CPU)]
    if importlib.util.find_spec("triton") is not None:
        from dynaspec.model.attention.cuda import CudaAttention

        found.append(CudaAttention(SPEC, CPU, torch.float32, 1))
    return found


def random_case(contexts: list[int], rows: list[int]) -> Case:
    return make(contexts, rows, dim=24)


CACHES = [*((backend, torch.float32) for backend in backends()), (backends()[0], torch.bfloat16)]


@pytest.mark.parametrize(("backend", "kept"), CACHES, ids=lambda of: str(of) if of in KEPT else type(of).__name__)
def test_what_was_moved_is_attended_to_as_if_it_had_been_written_there(backend: Any, kept: torch.dtype) -> None:
    """Through the cache alone, whose layout is the backend's own. Sources and targets overlap, across blocks."""
    case = random_case([30], [1])
    keys, values = case.past[0]
    order, found = np.arange(30), []
    order[[3, 4, 15, 16, 17]] = [4, 15, 16, 29, 3]  # each takes what stood there
    for moved in (True, False):
        shapes = backend.kv_shape(int(case.batch.block_tables.max()) + 1)
        kv = tuple(torch.full(shape, torch.nan, dtype=kept) for shape in shapes)
        past = (keys, values) if moved else (keys[order], values[order])
        case._fill(backend, kv, 0, *past)  # type: ignore[arg-type]
        if moved:
            places = np.flatnonzero(order != np.arange(30))
            source, target = (slots_of(case.batch.block_tables[0], at) for at in (order[places], places))
            backend.move(kv, torch.from_numpy(source), torch.from_numpy(target))
        found.append(backend.attend(case.q, case.k, case.v, kv, backend.prepare(case.batch), 26))
    assert torch.equal(*found)
    if isinstance(backend, CpuAttention):
        unmoved = case.run(backend, 26)
        assert not torch.allclose(found[0], unmoved, atol=1e-4)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("backend", backends()[:2], ids=lambda backend: type(backend).__name__)
def test_chains_and_trees_in_one_pass_are_those_of_passes_of_their_own(backend: Any, window: int | None) -> None:
    """A prompt's chunk of more rows than a set of bits holds, a tree, and a chain said as a tree."""
    alone = [random_case([7], [90]), as_tree(random_case([29], [7]), [-1, 0, 0, 1, 2, 2, 5]), random_case([18], [4])]
    blocks = np.cumsum([0, *(case.batch.block_tables.size for case in alone)])
    width = max(case.batch.block_tables.size for case in alone)
    tables = np.zeros((3, width), np.int32)
    for s, (case, first) in enumerate(zip(alone, blocks, strict=False)):
        tables[s, : case.batch.block_tables.size] = case.batch.block_tables[0] + first
    rows = [case.batch.rows for case in alone]
    batch = chain_batch([7, 29, 18], rows, tables)
    batch.positions = np.concatenate([case.batch.positions for case in alone])
    tree = alone[1].batch.ancestors
    assert tree is not None
    batch.ancestors = np.concatenate([np.full(90, -1), tree, (1 << np.arange(1, 5)) - 1])
    columns = {name: torch.cat([getattr(case, name) for case in alone]) for name in ("q", "k", "v")}
    together = replace(alone[0], batch=batch, past=[case.past[0] for case in alone], **columns)
    expected = torch.cat([case.run(backend, window) for case in alone])
    found = together.run(backend, window)
    assert torch.equal(found, expected)
    assert BLOCK_SIZE * width > 90
