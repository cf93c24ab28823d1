"""The compiled Triton kernels against plain PyTorch in float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dynaspec.model.attention.cuda import CudaAttention
from dynaspec.model.attention.reference import ReferenceAttention
from support.attention_cases import AttentionCase, run_case

LLAMA = (32, 8, 128)
SHAPES = [LLAMA, (32, 8, 64), (8, 8, 64), (12, 2, 80), (7, 1, 96), (8, 4, 256), (71, 1, 64)]
BLOCKS = 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

CASES = [
    AttentionCase(contexts=(1000,), rows=(1,)),
    AttentionCase(contexts=(0,), rows=(1,)),
    AttentionCase(contexts=(1000, 1, 70), rows=(1, 1, 90), hidden_keys=1),
    AttentionCase(contexts=(333, 17, 0, 64), rows=(1, 4, 2, 8)),
    AttentionCase(contexts=(15, 16, 17), rows=(16, 16, 16)),
    AttentionCase(contexts=(700, 40), rows=(64, 5), tree=True),
    AttentionCase(contexts=(2000,), rows=(8,), tree=True, padded=0.3),
    AttentionCase(contexts=(0, 500), rows=(300, 130)),
    AttentionCase(contexts=(800, 3), rows=(1, 200)),
    AttentionCase(contexts=(400, 90), rows=(6, 40), padded=0.3),
    AttentionCase(contexts=(0, 400), rows=(1, 1), padded=1.0),
    AttentionCase(contexts=(900, 20), rows=(5, 30), window=128),
    AttentionCase(contexts=(900,), rows=(12,), window=16, tree=True, padded=0.2),
    AttentionCase(contexts=(100,), rows=(300,), window=64),
    AttentionCase(contexts=(300, 20), rows=(4, 90), softcap=5.0),
    AttentionCase(contexts=(100, 30, 0), rows=(0, 3, 0)),
    AttentionCase(contexts=(100,) * 48, rows=(3,) * 48),
]


def assert_matches(case: AttentionCase, dtype: torch.dtype) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    expected = run_case(case, ReferenceAttention(case.spec, cpu), dtype=dtype)
    found = run_case(case, CudaAttention(case.spec, cuda, dtype), device="cuda", dtype=dtype)
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_match_the_reference(case: AttentionCase, dtype: torch.dtype) -> None:
    assert_matches(replace(case, heads=LLAMA), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_every_shape_of_heads_matches(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    for rows in ((1, 5), (100, 3)):
        assert_matches(AttentionCase(contexts=(260, 20), rows=rows, heads=heads), dtype)


@pytest.mark.parametrize("seed", range(20))
def test_random_passes_match(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = int(rng.integers(1, 9))
    tree = bool(rng.random() < 0.5)
    case = AttentionCase(
        contexts=tuple(rng.integers(0, 600, sequences).tolist()),
        rows=tuple(rng.integers(0, 65 if tree else 200, sequences).tolist()),
        heads=SHAPES[int(rng.integers(len(SHAPES)))],
        tree=tree,
        padded=float(rng.choice([0.0, 0.25])),
        window=[None, 40][int(rng.integers(2))],
        seed=seed,
    )
    assert_matches(case, torch.float32)


def test_a_value_that_is_not_a_number_reaches_only_rows_that_see_it() -> None:
    case = AttentionCase(contexts=(40,), rows=(3,), heads=LLAMA)
    backend = CudaAttention(case.spec, torch.device("cuda"), torch.bfloat16)
    found, _ = run_case(case, backend, device="cuda", dtype=torch.bfloat16, broken_row=1)
    assert found[0].isfinite().all()
    assert not found[1:].isfinite().any()


def test_nothing_waits_for_the_device() -> None:
    case = AttentionCase(contexts=(300, 20), rows=(4, 90), heads=LLAMA)
    pass_ = Pass(case)
    pass_.run()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        pass_.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_for_another_batch_of_its_signature() -> None:
    """Other contexts, other blocks, other queries: only the metadata and the inputs are copied in."""
    captured = Pass(AttentionCase(contexts=(300, 290), rows=(4, 4), heads=LLAMA))
    other = Pass(AttentionCase(contexts=(270, 310), rows=(4, 4), heads=LLAMA, seed=1))
    expected = other.run()
    captured.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.attend()
    captured.meta.refill(other.meta)
    captured.qkv.copy_(other.qkv)
    for mine, theirs in zip(captured.kv, other.kv, strict=True):
        mine.copy_(theirs)
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


class Pass:
    """One layer in bfloat16 on random caches and inputs."""

    def __init__(self, case: AttentionCase) -> None:
        torch.manual_seed(case.seed)
        self._heads = [case.heads[0], case.heads[1], case.heads[1]]
        self._backend = CudaAttention(case.spec, torch.device("cuda"), torch.bfloat16)
        self._batch = case.batch(case.contexts, "cuda")
        half = {"dtype": torch.bfloat16, "device": "cuda"}
        self.kv = tuple(torch.randn(shape, **half) for shape in self._backend.kv_shape(BLOCKS))
        self.qkv = torch.randn(self._batch.rows, sum(self._heads), case.heads[2], **half)
        self.meta = self._backend.prepare(self._batch)

    def attend(self) -> torch.Tensor:
        return self._backend.attend(*self.qkv.split(self._heads, 1), self.kv, self.meta, None)

    def run(self) -> torch.Tensor:
        self.meta = self._backend.prepare(self._batch)
        return self.attend()
