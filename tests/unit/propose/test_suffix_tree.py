from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.propose import suffix
from dynaspec.propose.suffix import Branching, SuffixDraft, SuffixTree
from dynaspec.propose.suffix_kernels import CLOCK
from support.suffix_reference import SuffixReference, strings_of


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def parents_of(draft: SuffixDraft) -> list[int]:
    assert draft.parents is not None
    return draft.parents.tolist()


def draft_of(tree: SuffixTree, *context: int, max_tokens: int = 8, **options: Any) -> SuffixDraft:
    return tree.speculate(ids(*context), len(context), max_tokens, **options)


class History:
    """A tree and the reference that live through the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.max_depth = self.random.randint(2, 24)
        self.tree, self.reference = SuffixTree(self.max_depth), SuffixReference(self.max_depth)
        self.letters = self.random.choice([1, 2, 2, 3, 4, 9, 300])
        self.seen: deque[int] = deque(range(1), maxlen=200)
        self.order: list[int] = []
        self.branched = 0
        """Trees with a node of several children."""

    def start(self) -> None:
        sequence = self.random.choice([i for i in range(9) if i not in self.order])
        self.order.append(sequence)
        self.tree.start(sequence)
        self.reference.start(sequence)

    def append(self) -> None:
        if self.order:
            sequence, tokens = self.random.choice(self.order), self.text(self.random.choice([0, 1, 1, 2, 5, 20, 90]))
            self.seen.extend(tokens)
            self.tree.append(sequence, np.array(tokens, self.random.choice([np.int32, np.int64])))
            self.reference.append(sequence, tokens)

    def evict(self) -> None:
        if self.order:
            self.tree.evict(self.order[0])
            self.reference.evict(self.order.pop(0))

    def clear(self) -> None:
        self.order.clear()
        self.tree.clear()
        self.reference.clear()

    def speculate(self) -> None:
        context = self.random.choice([*self.reference.texts.values(), [0]])[-30:] + self.text(self.random.randint(0, 3))
        max_tokens = self.random.choice([0, 1, 3, 8, 64])
        factor, offset = self.random.choice([0.0, 0.5, 1.0, 1.0, 3.0]), self.random.choice([-1.0, 0.0, 0.0, 4.0])
        least = self.random.choice([0.0, 0.1, 0.1, 0.3, 1.0])
        buffer = np.array([*context, 5, 5], self.random.choice([np.int32, np.int64]))  # what is behind is not read
        got = self.tree.speculate(buffer, len(context), max_tokens, factor, offset, least)
        tokens, probabilities, match, score = self.reference.speculate(context, max_tokens, factor, offset, least)
        assert (got.tokens.tolist(), got.match_length) == (tokens, match)
        assert got.score == pytest.approx(score, abs=1e-6)
        assert got.probabilities.tolist() == pytest.approx(probabilities, abs=1e-6)

    def speculate_tree(self) -> None:
        context = self.random.choice([*self.reference.texts.values(), [0]])[-30:] + self.text(self.random.randint(0, 3))
        size = (
            self.random.choice([0, 1, 8, 8, 63]),
            self.random.choice([1, 2, 5, 64]),
            self.random.choice([1, 2, 4, 16]),
        )
        factor, offset = self.random.choice([0.5, 1.0, 4.0, 4.0]), self.random.choice([-1.0, 0.0, 4.0, 9.0])
        least = self.random.choice([0.0, 0.1, 0.1, 0.3, 1.0])
        nodes, depth, width = size
        got = self.tree.speculate(
            np.array(context, np.int32), len(context), nodes, factor, offset, least, Branching(width, depth)
        )
        tokens, parents, probabilities, match, score = self.reference.speculate_tree(
            context, *size, factor, offset, least
        )
        assert got.parents is not None
        assert (got.tokens.tolist(), got.parents.tolist(), got.match_length) == (tokens, parents, match)
        assert got.score == pytest.approx(score, abs=1e-6)
        assert got.probabilities.tolist() == pytest.approx(probabilities, abs=1e-6)
        self.branched += len(set(parents)) < len(parents)

    def text(self, n: int) -> list[int]:
        """Random letters, or a piece of what has been, or either over and over."""
        start = self.random.randrange(max(len(self.seen), 1))
        if self.random.random() < 0.5:
            piece = list(self.seen)[start : start + n]
        else:
            piece = [self.random.randrange(self.letters) for _ in range(n)]
        return (piece * n)[:n] if self.random.random() < 0.3 else piece

    def live(self, steps: int) -> None:
        acts = [self.start, self.append, self.append, self.append, self.evict]
        for _ in range(steps):
            act = self.random.choice(acts)
            if act != self.start or len(self.order) < 6:
                act()
            self.speculate()
            self.speculate()

    def check(self) -> None:
        assert strings_of(self.tree) == self.reference.count
        assert self.tree.sequences == len(self.order)
        assert self.tree.tokens == sum(map(len, self.reference.texts.values()))


@pytest.mark.parametrize("block", range(16))
def test_it_drafts_what_the_definition_says_through_any_history(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        history = History(seed)
        history.live(12)
        history.check()
        history.live(12)
        history.check()
        if seed % 4 == 0:
            history.clear()
            history.live(12)
            history.check()
        while history.order:
            history.evict()
            history.speculate()
        history.check()
        assert (history.tree.nodes, history.tree.pages, history.tree.tokens) == (1, 0, 0)


def test_its_trees_are_what_the_definition_says_through_any_history() -> None:
    branched = 0
    for seed in range(200):
        history = History(seed)
        for _ in range(3):
            history.live(6)
            for _ in range(12):
                history.speculate_tree()
        branched += history.branched
    assert branched > 200


def test_a_tree_takes_the_most_probable_token_after_any_node() -> None:
    tree = SuffixTree(8)
    tree.start(0)
    tree.append(0, ids(1, 2, 3, 1, 2, 4, 1, 9, 7, 1, 5, 6))
    asked: dict[str, Any] = {"max_tokens": 8, "max_factor": 8.0}
    found = draft_of(tree, 0, 1, branching=Branching(2, 2), **asked)  # 2 twice of four times
    assert (found.tokens.tolist(), parents_of(found)) == ([2, 5, 4, 3, 6], [-1, -1, 0, 0, 1])
    found = draft_of(tree, 0, 1, branching=Branching(1, 2), **asked)
    assert (found.tokens.tolist(), parents_of(found)) == ([2, 4], [-1, 0])
    found = draft_of(tree, 0, 1, branching=Branching(2, 1), **asked)
    assert (found.tokens.tolist(), parents_of(found)) == ([2, 5], [-1, -1])


def test_the_draft_of_the_largest_score_wins_and_among_equals_the_longest_match() -> None:
    tree = SuffixTree(8)
    tree.start(0)
    tree.append(0, ids(1, 2, 3, 4, 9, 7, 3, 5, 8, 3, 5))
    found = draft_of(tree, 6, 1, 2, 3)  # 3 alone was followed by 5 twice out of three times, 1 2 3 always by 4
    assert (found.tokens.tolist(), found.match_length, found.score) == ([4, 9, 7], 3, 3.0)
    found = draft_of(tree, 6, 1, 2, 3, max_tokens=1)
    assert (found.tokens.tolist(), found.match_length) == ([4], 3)
    found = draft_of(tree, 6, 6, 3, max_factor=2.0)
    assert (found.tokens.tolist(), found.match_length) == ([5, 8], 1)
    assert found.probabilities.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert draft_of(tree, 6, 6, 3, max_factor=2.0, min_probability=0.5).tokens.tolist() == [5]


def test_match_and_draft_together_are_no_longer_than_max_depth() -> None:
    tree = SuffixTree(6)
    tree.start(0)
    tree.append(0, np.arange(20, dtype=np.int32))
    found = draft_of(tree, *range(10), max_factor=9.0)
    assert (found.tokens.tolist(), found.match_length) == ([10, 11, 12, 13, 14], 1)
    found = draft_of(tree, *range(10))
    assert (found.tokens.tolist(), found.match_length) == ([10, 11, 12], 3)


def test_among_equally_frequent_tokens_the_one_that_occurred_last_is_drafted() -> None:
    tree = SuffixTree(4)
    for sequence in range(2):
        tree.start(sequence)
    tree.append(1, ids(1, 2))
    tree.append(0, ids(1, 3))
    assert draft_of(tree, 0, 1).tokens.tolist() == [3]
    tree.append(1, ids(1))
    tree.append(0, ids(1, 3))
    tree.append(1, ids(2))
    assert draft_of(tree, 0, 1).tokens.tolist() == [2]


def test_nothing_is_drafted_where_nothing_matches() -> None:
    tree = SuffixTree(4)
    for context in [(), (1,), (1, 2)]:
        found = draft_of(tree, *context)
        assert (found.tokens.size, found.probabilities.size, found.match_length, found.score) == (0, 0, 0, 0.0)
    tree.start(0)
    tree.append(0, ids(1, 2))
    assert draft_of(tree, 1).tokens.size == 0, "the whole text is never the match"
    assert draft_of(tree, 0, 1).tokens.tolist() == [2]
    assert draft_of(tree, 0, 1, max_tokens=0).tokens.size == 0


def test_a_draft_stays_as_it_was_when_the_tree_changes() -> None:
    tree = SuffixTree(4)
    tree.start(0)
    tree.append(0, ids(1, 2, 3))
    found = draft_of(tree, 0, 1, max_factor=2.0)
    tree.append(0, ids(1, 7, 7, 1, 7, 7))
    draft_of(tree, 0, 1, max_factor=2.0)
    assert found.tokens.tolist() == [2, 3]


def test_text_that_repeats_needs_no_memory_but_for_its_tokens() -> None:
    tree = SuffixTree(16)
    tree.start(0)
    tree.append(0, np.tile(np.arange(10, dtype=np.int32), 20))
    nodes = tree.nodes
    assert nodes < 16 * 10
    tree.append(0, np.tile(np.arange(10, dtype=np.int32), 2000))
    assert tree.nodes <= nodes
    for sequence in range(1, 50):
        tree.start(sequence)
        tree.append(sequence, np.tile(np.arange(10, dtype=np.int32), 20))
    assert tree.nodes < 2 * nodes


def test_memory_is_used_again_after_evictions() -> None:
    draw = np.random.default_rng(0)
    tree = SuffixTree(8)
    size = 0
    for sequence in range(400):
        if sequence >= 20:
            tree.evict(sequence % 20)
        if sequence == 40:
            size = tree.bytes
        tree.start(sequence % 20)
        tree.append(sequence % 20, draw.integers(0, 50, 200, dtype=np.int32))
    assert (tree.sequences, tree.tokens, tree.pages) == (20, 4000, 80)
    assert tree.bytes <= 2 * size
    tree.clear()
    assert (tree.sequences, tree.tokens, tree.nodes, tree.pages) == (0, 0, 1, 0)
    assert tree.bytes < size / 8


def test_the_clock_may_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "_LAST_STAMP", 2000)
    history = History(7)
    history.live(700)
    history.check()
    assert history.reference.clock > 4000 > 2 * history.tree._tree.counters[CLOCK]


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^max_depth must be 2 at least, .* not 1\.$"):
        SuffixTree(1)
    tree = SuffixTree(4)
    with pytest.raises(ValueError, match=r"^A sequence's number must be 0 at least, not -1\.$"):
        tree.start(-1)
    for act in (lambda: tree.evict(0), lambda: tree.append(0, ids(1))):
        with pytest.raises(ValueError, match=r"^Sequence 0 is not in the suffix tree\.$"):
            act()
    tree.start(3)
    tree.start(0)
    with pytest.raises(ValueError, match=r"^Sequence 0 is already in the suffix tree\.$"):
        tree.start(0)
    with pytest.raises(ValueError, match=r"^Sequence 0 cannot be evicted before 3, the oldest in the suffix tree\.$"):
        tree.evict(0)
    tree.evict(3)
    tree.evict(0)
    assert tree.sequences == 0
