"""The compiled row-wise kernels against plain PyTorch on the same device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.row_ops import CHECKS, assert_same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_rows_match_plain_pytorch(check: Any, dtype: torch.dtype) -> None:
    from dynaspec.model.cuda_ops import CudaOps

    assert_same(check, CudaOps(), "cuda", dtype)
