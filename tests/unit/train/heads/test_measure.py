"""What is measured of a trained head: accepted tokens of a walk, and agreement."""

from __future__ import annotations

import torch

from dynaspec.train.heads.head import join
from dynaspec.train.heads.measure import agreement, walk
from unit.train.heads.conftest import VOCABULARY, example, make_head


def test_a_walk_takes_what_agrees_and_one_token_more() -> None:
    right = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    got = walk(right, [(0, 4), (4, 6)])
    # First text: two right and one more (3), then none right (1); second: two tokens are left, not four.
    assert (got.steps, got.emitted) == (3, 6)
    assert got.length == 2.0
    assert got.drafted == (6, 4, 3)
    assert got.correct == (4, 3, 1)
    assert (got + got).emitted == 12


def test_agreement_compares_with_the_texts_own_tokens() -> None:
    head = make_head()
    with torch.no_grad():
        head.lm_head.weight.zero_()
        head.lm_head.weight[7] = 1e-3  # of all tokens only this one, or one that ties, is ever drafted
        batch = join([example(2, 6, seed=4)])
        batch.labels[:] = VOCABULARY.ids[7]
        equal = agreement(head, batch, 3)
    assert equal.shape == (5, 3)
    assert not equal[-1, 1:].any()  # there is no room behind the last token
