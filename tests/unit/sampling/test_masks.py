"""Masks of rows: the compiled kernels, and the same in torch, against one bit at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.sampling import accelerator, ops


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("words", [1, 2, 4])
def test_only_set_bits_are_kept(vocab: int, words: int) -> None:
    rng = np.random.default_rng(vocab + words)
    bits = rng.integers(-(2**31), 2**31, (6, words)).astype(np.int32)
    bits[0], bits[1] = -1, 0
    scores = torch.from_numpy(rng.normal(size=(9, vocab)).astype(np.float32))
    index = np.array([8, 2, 3, 0, 5, 6])
    expected = scores.clone()
    for row, mask in zip(index, bits, strict=True):
        for token in range(vocab):
            if token >= 32 * words or not int(mask[token // 32]) >> token % 32 & 1:
                expected[row, token] = -torch.inf
    in_torch = accelerator.keep_set(scores[index], torch.from_numpy(bits))
    ops.keep_set(scores, index, bits)
    assert torch.equal(scores, expected)
    assert torch.equal(in_torch, expected[index])


def test_rows_without_any_score_are_found() -> None:
    scores = torch.zeros(5, 40)
    scores[1] = -torch.inf
    scores[2] = -torch.inf
    scores[2, 39] = -1e30
    scores[3] = torch.nan
    assert ops.empty(scores, np.array([0, 1, 2, 3, 1])).tolist() == [False, True, False, True, True]
