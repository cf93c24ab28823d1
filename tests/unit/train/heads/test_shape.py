"""The draft vocabulary of a head."""

from __future__ import annotations

import pytest
import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.train.heads.shape import DraftVocabulary, coverage, most_frequent


def test_offsets_lead_from_draft_ids_to_the_targets() -> None:
    vocabulary = DraftVocabulary(torch.tensor([1, 4, 5, 9]), 12)
    assert (torch.arange(4) + vocabulary.d2t).tolist() == [1, 4, 5, 9]
    assert vocabulary.t2d.nonzero().flatten().tolist() == [1, 4, 5, 9]


def test_the_most_frequent_tokens_are_kept_with_those_that_must_be() -> None:
    texts = [torch.tensor([7, 7, 7, 3, 3]), torch.tensor([5, 5, 5, 5])]
    vocabulary = most_frequent(texts, 10, 4, always=[9])
    assert vocabulary.ids.tolist() == [3, 5, 7, 9]
    assert coverage(texts, most_frequent(texts, 10, 2)) == pytest.approx(7 / 9)
    assert most_frequent(texts, 10, 5).ids.tolist() == [0, 1, 3, 5, 7]  # what never occurs fills up, lowest first


def test_a_vocabulary_larger_than_the_targets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 11, expected 1 … 10"):
        most_frequent([], 10, 11)
    with pytest.raises(ConfigError, match="expected every id once"):
        DraftVocabulary(torch.tensor([3, 3]), 10)
