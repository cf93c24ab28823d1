"""The Triton kernels in Triton's interpreter, on the CPU. tests/gpu runs them compiled."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from dynaspec.model.attention.reference import ReferenceAttention
from support.attention_cases import AttentionCase, run_case
from support.row_ops import CHECKS, assert_same

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # a sigmoid of 0, as on hardware

if torch.cuda.is_available():
    pytest.skip("there is a CUDA device: tests/gpu runs the compiled kernels", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton, which PyTorch's CPU build does not bring", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, which is not before they are used

CASES = [
    AttentionCase(contexts=(20, 0), rows=(3, 2)),
    AttentionCase(contexts=(40, 5, 0), rows=(1, 4, 2), heads=(8, 2, 16)),
    AttentionCase(contexts=(33, 20), rows=(12, 64), tree=True),
    AttentionCase(contexts=(40, 50), rows=(5, 9), padded=0.3),
    AttentionCase(contexts=(40, 50), rows=(5, 9), padded=0.3, tree=True, window=24),
    AttentionCase(contexts=(0, 40), rows=(1, 1), padded=1.0),
    AttentionCase(contexts=(60, 10), rows=(5, 3), window=16),
    AttentionCase(contexts=(0, 30), rows=(90, 70)),
    AttentionCase(contexts=(30,), rows=(90,), window=48),
    AttentionCase(contexts=(30, 20, 0), rows=(0, 3, 0)),
    AttentionCase(contexts=(30,), rows=(4,), softcap=3.0),
    AttentionCase(contexts=(30, 1, 17), rows=(4, 1, 20), hidden_keys=1),
    AttentionCase(contexts=(30, 20), rows=(4, 12), hidden_keys=1, window=16),
    AttentionCase(contexts=(20,), rows=(3,), heads=(7, 1, 80)),
    AttentionCase(contexts=(20,), rows=(2,), heads=(2, 2, 256)),
]


def assert_matches_reference(case: AttentionCase, dtype: torch.dtype, processors: int, tolerance: float) -> None:
    from dynaspec.model.attention.cuda import CudaAttention

    expected = run_case(case, ReferenceAttention(case.spec, CPU), dtype=dtype)
    found = run_case(case, CudaAttention(case.spec, CPU, dtype, processors), dtype=dtype)
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_match_the_reference(case: AttentionCase) -> None:
    assert_matches_reference(case, torch.float32, processors=1, tolerance=1e-5)


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")  # an empty share's −∞ is meant
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(contexts=(300,), rows=(1,), heads=(2, 1, 16)),
        AttentionCase(contexts=(290, 3), rows=(3, 2), heads=(2, 1, 16), tree=True),
        AttentionCase(contexts=(290,), rows=(2,), heads=(3, 1, 16), window=20, padded=0.4),
    ],
    ids=str,
)
def test_shares_of_the_keys_are_merged(case: AttentionCase) -> None:
    assert_matches_reference(case, torch.float32, processors=2, tolerance=1e-5)


def test_half_precision_matches_to_its_rounding() -> None:
    """In float16: the interpreter does not multiply bfloat16 as hardware does."""
    case = AttentionCase(contexts=(20, 40), rows=(3, 2))
    assert_matches_reference(case, torch.float16, processors=1, tolerance=2e-3)


def test_a_value_that_is_not_a_number_reaches_only_rows_that_see_it() -> None:
    from dynaspec.model.attention.cuda import CudaAttention

    case = AttentionCase(contexts=(0,), rows=(3,), heads=(1, 1, 16))
    found, _ = run_case(case, CudaAttention(case.spec, CPU, torch.float32, 1), broken_row=1)
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()
    assert not found[2].isfinite().any()


def test_one_signature_for_all_contexts_of_one_grid() -> None:
    from dynaspec.model.attention.cuda import CudaAttention

    case = AttentionCase(contexts=(20, 25), rows=(3, 3))
    backend = CudaAttention(case.spec, CPU, torch.float32, 1)
    metas = [backend.prepare(case.batch(contexts)) for contexts in ((20, 25), (29, 17), (20, 70))]
    assert metas[0].signature == metas[1].signature != metas[2].signature
    metas[0].refill(metas[1])
    assert metas[0].context_lens.tolist() == [29, 17]
    with pytest.raises(ValueError, match="signature"):
        metas[0].refill(metas[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_row_operations_match_plain_pytorch(check: Any, dtype: torch.dtype) -> None:
    from dynaspec.model.cuda_ops import CudaOps

    assert_same(check, CudaOps(), "cpu", dtype)
