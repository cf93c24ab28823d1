from __future__ import annotations

import numpy as np
import torch

from dynaspec.sampling.draw import logprobs


def test_columns_of_a_small_example() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.4, 0.1], [0.7, 0.1, 0.15, 0.05]]))
    columns = logprobs(logits, np.array([3, 2]), 3)
    assert columns.chosen_rank.tolist() == [3, 2]
    assert columns.top_tokens.tolist() == [[1, 2, 0], [0, 2, 1]]
    np.testing.assert_allclose(np.exp(columns.chosen), [0.1, 0.15], rtol=1e-6)
    np.testing.assert_allclose(np.exp(columns.top), [[0.4, 0.4, 0.1], [0.7, 0.15, 0.1]], rtol=1e-6)


def test_numbers_of_top_tokens() -> None:
    logits = torch.randn(2, 6)
    chosen = np.array([0, 1])
    for asked, given in ((0, 0), (2, 2), (6, 6), (9, 6), (-1, 6)):
        columns = logprobs(logits, chosen, asked)
        assert columns.top.shape == columns.top_tokens.shape == (2, given)
    np.testing.assert_array_equal(np.argsort(-logits.numpy(), axis=-1), columns.top_tokens)
