"""Trees that cannot be verified are told from those that can."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dynaspec.contract.errors import ProposerFault
from dynaspec.contract.proposer import Drafts
from dynaspec.contract.step import TreeRule
from dynaspec.propose.guard import misgrown, nonsense
from unit.propose.batches import plan

PLAN = replace(plan(2, 2, 2), nodes=(4, 4, 4), tree=TreeRule(2))
GOOD = [-1, -1, 0, 1]


def drafts(*parents: list[int], **columns: object) -> Drafts:
    size = len(parents)
    made = Drafts(np.ones((size, 4), np.int64), np.full(size, 4), parents=np.array(parents, np.int64))
    return replace(made, **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", [[0, -1, 0, 1], [-1, 1, 0, 1], [-1, 2, 0, 1], [-1, -2, 0, 1], [-1, 0, 1, 0], [-1, -1, 0, 2]], ids=str
)
def test_one_bad_tree_does_not_touch_the_others(bad: list[int]) -> None:
    """A parent that is the node itself, that comes behind it, that is none; and one level too many."""
    assert nonsense(drafts(GOOD, bad, GOOD), PLAN, 8).tolist() == [False, True, False]


def test_what_lies_behind_the_last_node_does_not_count() -> None:
    assert nonsense(drafts(GOOD, [-1, -1, 0, 9], GOOD, lens=np.array([4, 3, 0])), PLAN, 8).tolist() == [False] * 3


def test_more_nodes_than_were_granted_and_tokens_that_are_none() -> None:
    few = replace(PLAN, nodes=(4, 3, 4))
    assert nonsense(drafts(GOOD, GOOD, GOOD), few, 8).tolist() == [False, True, False]
    assert nonsense(drafts(GOOD, GOOD, GOOD), PLAN, 1).tolist() == [True] * 3


def test_random_trees_against_their_definition() -> None:
    rng = np.random.default_rng(0)
    parents = np.array([[rng.integers(-2, j + 2) if rng.random() < 0.15 else rng.integers(-1, j) if j else -1
                         for j in range(6)] for _ in range(300)])  # fmt: skip
    lens, depth = rng.integers(0, 7, 300), rng.integers(1, 5, 300)
    for row, n, most, bad in zip(parents.tolist(), lens, depth, misgrown(parents, lens, depth), strict=True):
        ordered = all(-1 <= above < j for j, above in enumerate(row[:n]))
        levels: list[int] = []
        for above in row[:n] if ordered else []:
            levels.append(1 if above < 0 else levels[above] + 1)
        assert bad == (not ordered or max(levels, default=0) > most)


def test_columns_of_another_form() -> None:
    with pytest.raises(ProposerFault, match=r"parents \(3, 3\); expected \(3, 4\)"):
        nonsense(drafts(GOOD, GOOD, GOOD, parents=np.zeros((3, 3), np.int64)), PLAN, 8)
    with pytest.raises(ProposerFault, match="parents and q; expected trees of certain tokens"):
        nonsense(drafts(GOOD, GOOD, GOOD, q=torch.ones(3, 4, 8)), PLAN, 8)
