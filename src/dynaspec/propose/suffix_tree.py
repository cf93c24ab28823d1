"""Suffix decoding's memory: what has followed the end of a text before, how often (Oliaro et al. 2411.04975)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dynaspec.contract.errors import ConfigError

from .suffix_kernels import (
    AGE,
    CLOCK,
    COLUMNS,
    COUNTERS,
    ENTRIES,
    FIELDS,
    FREE_PAGE,
    LIVE,
    PAGE,
    PAGES,
    ROWS,
    SIZE,
    STAMP,
    Tree,
    append_tokens,
    best_draft,
    best_tree,
    fullest,
    refill,
    remove_sequence,
)

_LAST_STAMP = 2**31 - 1
_FIRST_PAGES = 4
_FIRST_SLOTS = 4


class Branching(NamedTuple):
    """Bounds of a draft tree."""

    width: int
    """Children of a node."""
    depth: int


@dataclass(frozen=True, slots=True)
class SuffixDraft:
    """What may follow a text."""

    tokens: npt.NDArray[np.int64]
    """[n]"""
    probabilities: npt.NDArray[np.float32]
    """[n] by the counts, of the draft up to and including each token; never rises. In a tree, of the path that
    ends with it."""
    match_length: int
    """Last tokens of the text that it follows; 0 if n is 0."""
    score: float
    """Sum of ``probabilities``: tokens expected to be right."""
    parents: npt.NDArray[np.int64] | None = None
    """[n] of a tree's nodes, −1: the text's end; None for a path."""


class SuffixTree:
    """Counts of all strings of up to ``max_depth`` tokens in a set of growing sequences.

    The count of a string is the number of places, over all sequences, at which it occurs. Work: up to ``max_depth``
    steps for a token appended or removed; for a query a few walks of ``max_depth`` tokens. Memory: one to two nodes
    of 48 bytes for a token of new text, next to none for text that repeats. Not for several threads at once.
    """

    def __init__(self, max_depth: int) -> None:
        """Args:
            max_depth: match and draft together are at most as long, in tokens.

        Raises:
            ConfigError: it is below 2.
        """
        if max_depth < 2:
            raise ConfigError(f"max_depth must be 2 at least, for a match and a draft of one token, not {max_depth}.")
        self._max_depth = max_depth
        self._context = np.empty(max_depth, np.int32)
        self.clear()

    @property
    def max_depth(self) -> int:
        return self._max_depth

    @property
    def sequences(self) -> int:
        """Sequences that are in."""
        return len(self._order)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self._tokens

    @property
    def nodes(self) -> int:
        """Nodes, the root too: 1 if nothing is in."""
        return int(self._tree.counters[LIVE])

    @property
    def pages(self) -> int:
        """Pages of 64 tokens in use."""
        return int(self._tree.counters[PAGES])

    @property
    def bytes(self) -> int:
        """Memory of all arrays; it never shrinks but in ``clear``."""
        return sum(array.nbytes for array in self._tree) + self._context.nbytes

    def clear(self) -> None:
        """Removes everything and gives the memory back."""
        self._order: OrderedDict[int, None] = OrderedDict()
        self._age = self._tokens = 0
        depth = self._max_depth
        self._tree = Tree(
            nodes=np.zeros((4 * depth, COLUMNS), np.int32),
            table=np.zeros(1 << (8 * depth).bit_length(), np.int64),
            tokens=np.empty(_FIRST_PAGES * PAGE, np.int32),
            next_page=np.empty(_FIRST_PAGES, np.int32),
            page_age=np.empty(_FIRST_PAGES, np.int64),
            sequences=np.zeros((_FIRST_SLOTS, FIELDS), np.int64),
            ends=np.empty((_FIRST_SLOTS, depth), np.int32),
            counters=np.zeros(COUNTERS, np.int64),
            drafts=np.empty((2, depth), np.int64),
            probabilities=np.empty((2, depth), np.float32),
        )
        self._tree.counters[[LIVE, ROWS, FREE_PAGE]] = 1, 1, -1

    def start(self, sequence: int) -> None:
        """Begins an empty sequence, which is now the newest: it will be evicted after all that are in.

        Args:
            sequence: the caller's name for it, a small number from 0: memory goes with the largest.

        Raises:
            ValueError: a sequence of that name is in.
        """
        if sequence in self._order:
            raise ValueError(f"Sequence {sequence} is already in the suffix tree.")
        if sequence < 0:
            raise ValueError(f"A sequence's number must be 0 at least, not {sequence}.")
        slots = self._tree.sequences.shape[0]
        if sequence >= slots:
            slots = max(sequence + 1, 2 * slots)
            self._tree = self._tree._replace(
                sequences=_longer(self._tree.sequences, slots), ends=_longer(self._tree.ends, slots)
            )
        self._order[sequence] = None
        self._age += 1
        self._tree.sequences[sequence] = 0
        self._tree.sequences[sequence, AGE] = self._age

    def append(self, sequence: int, tokens: npt.NDArray[np.integer]) -> None:
        """Appends to a sequence. Sequences may grow in turns.

        Args:
            tokens: [n] int32 or int64 of the range of int32.

        Raises:
            ValueError: the sequence is not in.
        """
        self._require(sequence)
        text = np.array(tokens, np.int32)
        self._tokens += text.size
        done = 0
        while True:
            done += append_tokens(self._tree, sequence, text, done, _LAST_STAMP)
            if done == text.size:
                return
            self._make_room()

    def evict(self, sequence: int) -> None:
        """Removes the oldest sequence.

        Raises:
            ValueError: it is not in, or not the oldest.
        """
        self._require(sequence)
        oldest = next(iter(self._order))
        if sequence != oldest:
            raise ValueError(f"Sequence {sequence} cannot be evicted before {oldest}, the oldest in the suffix tree.")
        remove_sequence(self._tree, sequence)
        self._tokens -= int(self._tree.sequences[sequence, SIZE])
        del self._order[sequence]

    def speculate(
        self,
        context: npt.NDArray[np.int32],
        length: int,
        max_tokens: int,
        max_factor: float = 1.0,
        max_offset: float = 0.0,
        min_probability: float = 0.1,
        branching: Branching | None = None,
    ) -> SuffixDraft:
        """Drafts what has most often followed the end of a text.

        For every length of the match, from 1 to one less than the text (or than its last ``max_depth`` tokens): at
        most ``max_factor`` · match + ``max_offset`` tokens, each the most frequent after those before it, among equally
        frequent ones the one that occurred last, be it in a sequence evicted since. The draft with the largest score
        is returned, among equals that of the longest match.

        A tree takes the most probable token of all that may follow one of its nodes, time after time; so parents come
        before their children, and the most frequent child before its brothers.

        Args:
            context: [≥ length] the text.
            length: its tokens.
            max_tokens: in the draft, at most.
            min_probability: the draft stops before a token with a lower one.
            branching: of a tree; None = a path.
        """
        n = min(length, self._max_depth)
        self._context[:n] = context[length - n : length]
        bounds = float(max_factor), float(max_offset), float(min_probability)
        if branching is not None:
            size = max_tokens, branching.depth, branching.width
            tokens, parents, probabilities, match, score = best_tree(self._tree, self._context, n, *size, *bounds)
            return SuffixDraft(tokens, probabilities, match, score, parents)
        row, drafted, match, score = best_draft(self._tree, self._context, n, max_tokens, *bounds)
        return SuffixDraft(
            self._tree.drafts[row, :drafted].copy(), self._tree.probabilities[row, :drafted].copy(), match, score
        )

    def _require(self, sequence: int) -> None:
        if sequence not in self._order:
            raise ValueError(f"Sequence {sequence} is not in the suffix tree.")

    def _make_room(self) -> None:
        """Doubles what is too small for one more token, whatever it be."""
        tree, counters = self._tree, self._tree.counters
        if counters[LIVE] + self._max_depth > tree.nodes.shape[0]:
            tree = tree._replace(nodes=_longer(tree.nodes, 2 * tree.nodes.shape[0]))
        if counters[ENTRIES] + 2 * self._max_depth > fullest(tree.table.size):
            table = np.zeros(2 * tree.table.size, np.int64)
            refill(table, tree.table)
            tree = tree._replace(table=table)
        if counters[PAGES] == tree.next_page.size:
            pages = 2 * tree.next_page.size
            tree = tree._replace(
                tokens=_longer(tree.tokens, pages * PAGE),
                next_page=_longer(tree.next_page, pages),
                page_age=_longer(tree.page_age, pages),
            )
        if counters[CLOCK] >= _LAST_STAMP:
            stamps = tree.nodes[: counters[ROWS], STAMP]
            distinct, stamps[:] = np.unique(stamps, return_inverse=True)
            counters[CLOCK] = distinct.size
        self._tree = tree


@cache
def load_kernels() -> None:
    """Loads what is compiled of a tree, once a process, or the first steps would wait for it."""
    tree, text = SuffixTree(2), np.zeros(5, np.int32)
    tree.start(0)
    tree.append(0, text)
    for branching in (None, Branching(1, 1)):
        tree.speculate(text, text.size, 1, branching=branching)
    refill(np.zeros(8, np.int64), np.zeros(8, np.int64))
    tree.evict(0)


def _longer(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """A copy with more rows, the new ones undefined."""
    out = np.empty((size, *array.shape[1:]), array.dtype)
    out[: array.shape[0]] = array
    return out
