"""Suffix decoding: drafts what has followed the text's end most often, in the request's own text or in the answers of
others (Oliaro et al. 2411.04975; option names and defaults are vLLM's).

A suffix tree counts what has followed the end of a text before. A running request's text has a tree of its own. Answers
of earlier requests are kept in one tree for each cache salt, bounded in all together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import DecodeBatch, Drafts, KeptText, NewText, Offers, ProposerNeeds, TargetStep
from dynaspec.contract.step import SpecPlan, TreeRule
from dynaspec.control.keys import SuffixSettings

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

Int32 = npt.NDArray[np.int32]

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


@dataclass(slots=True)
class _Tenant:
    """What requests of one cache salt share."""

    tree: SuffixTree
    free: list[int] = field(default_factory=list)
    """Names of sequences that have been evicted."""
    used: int = 0
    """Names ever given out."""


class ResponseCache:
    """The latest answers, those that still grow too. The oldest one leaves first, whosever it is.

    Requests with different salts never see each other's tokens, not even by how long drafts are.

    Args:
        max_depth: see ``SuffixTree``.
        max_responses: answers kept at most; 0 = none.
        max_tokens: of all of them together, at most.
    """

    def __init__(self, max_depth: int, max_responses: int, max_tokens: int) -> None:
        self._max_depth, self._max_responses, self._max_tokens = max_depth, max_responses, max_tokens
        self._tenants: dict[str, _Tenant] = {}
        self._order: OrderedDict[int, tuple[str, int]] = OrderedDict()
        """Key of an answer → cache salt and name in its tree, the oldest first."""
        self._next = 0
        self.tokens = 0
        """Of all answers."""

    def __len__(self) -> int:
        return len(self._order)

    @property
    def bytes(self) -> int:
        """Memory of the trees."""
        return sum(tenant.tree.bytes for tenant in self._tenants.values())

    def start(self, cache_salt: str) -> int | None:
        """Begins an answer, for which the oldest one may leave.

        Returns:
            Its key; None if none are kept.
        """
        if not self._max_responses:
            return None
        while len(self._order) >= self._max_responses:
            self._evict()
        tenant = self._tenants.get(cache_salt)
        if tenant is None:
            tenant = self._tenants[cache_salt] = _Tenant(SuffixTree(self._max_depth))
        if tenant.free:
            name = tenant.free.pop()
        else:
            name, tenant.used = tenant.used, tenant.used + 1
        tenant.tree.start(name)
        key, self._next = self._next, self._next + 1
        self._order[key] = cache_salt, name
        return key

    def append(self, key: int | None, tokens: npt.NDArray[np.integer]) -> None:
        """An answer has grown by these tokens [n]. Nothing happens if it has left, or was never kept."""
        if key is None or key not in self._order:
            return
        cache_salt, name = self._order[key]
        self._tenants[cache_salt].tree.append(name, tokens)
        self.tokens += tokens.size
        while self.tokens > self._max_tokens:
            self._evict()

    def speculate(
        self,
        cache_salt: str,
        context: npt.NDArray[np.int32],
        length: int,
        max_tokens: int,
        max_factor: float,
        min_probability: float,
        branching: Branching | None = None,
    ) -> SuffixDraft | None:
        """What answers of this salt go on with; see ``SuffixTree.speculate``. None if there are none."""
        tenant = self._tenants.get(cache_salt)
        if tenant is None:
            return None
        return tenant.tree.speculate(context, length, max_tokens, max_factor, 0.0, min_probability, branching)

    def _evict(self) -> None:
        _, (cache_salt, name) = self._order.popitem(last=False)
        tenant = self._tenants[cache_salt]
        before = tenant.tree.tokens
        tenant.tree.evict(name)
        self.tokens -= before - tenant.tree.tokens
        tenant.free.append(name)
        if not tenant.tree.sequences:
            del self._tenants[cache_salt]


class RequestText:
    """A running request's text, in a tree of its own, and what may follow it.

    Args:
        longest: most tokens that a draft may have.
        answers: of all requests; this one's output is added.
        cache_salt: of the answers that are drafted from.
    """

    def __init__(self, settings: SuffixSettings, longest: int, answers: ResponseCache, cache_salt: str = "") -> None:
        self.own = SuffixTree(settings.max_tree_depth)
        self.own.start(0)
        self.length = 0
        """Tokens that are in."""
        self._settings, self._longest = settings, longest
        self._answers, self._cache_salt = answers, cache_salt
        self._answer = answers.start(cache_salt)
        self._draft: SuffixDraft | None = None

    def append(self, text: Int32, start: int, end: int) -> None:
        """Tokens ``start`` … ``end`` − 1 of a text are output; those before them that are not in yet are the prompt."""
        self.own.append(0, text[self.length : end])
        self._answers.append(self._answer, text[start:end])
        self.length, self._draft = end, None

    def draft(self, text: Int32) -> SuffixDraft | None:
        """What most likely goes on, by the counts of the text itself or, if those of other answers promise more, by
        theirs; None as long as nothing is in.

        Args:
            text: [≥ length]
        """
        if self._draft is None and self.length:
            self._draft = self._best(text, self._longest)
        return self._draft

    def tree(self, text: Int32, nodes: int, branching: Branching) -> SuffixDraft | None:
        """The same as a tree of so many ``nodes`` at most."""
        return self._best(text, nodes, branching) if self.length else None

    def _best(self, text: Int32, most: int, branching: Branching | None = None) -> SuffixDraft:
        on, asked = self._settings, (text, self.length, most, self._settings.max_spec_factor)
        found = self.own.speculate(*asked, 0.0, on.min_token_prob, branching)
        others = self._answers.speculate(self._cache_salt, *asked, on.min_token_prob, branching)
        return others if others is not None and others.score > found.score else found


class SuffixProposer:
    """Keeps trees of counts. Its offers are looked up once a step, and drafted from as they are; draft trees are made
    only when they are asked for.

    A step that is planned ahead asks for offers while the one before it drafts, in another thread: hence the lock. It
    is offered what followed the text as it was last committed.

    Args:
        longest: most tokens that a draft may have.
    """

    traits = METHODS["suffix"].traits
    needs = ProposerNeeds(text=True)

    def __init__(self, settings: SuffixSettings, longest: int) -> None:
        load_kernels()
        self._settings = settings
        self._longest = longest
        self._lanes: dict[int, RequestText] = {}
        self._lock = Lock()
        self.cache = ResponseCache(settings.max_tree_depth, settings.max_cached_requests, settings.max_cached_tokens)

    def kept(self) -> KeptText:
        """What all trees hold and take."""
        with self._lock:
            own = sum(lane.own.bytes for lane in self._lanes.values())
            return KeptText(len(self.cache), self.cache.tokens, own + self.cache.bytes)

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return (0,) * len(batch.ids)

    def peek(self, batch: DecodeBatch) -> Offers:
        with self._lock:
            drafts = [self._draft(batch.tokens, lane) for lane in batch.lanes.tolist()]
        found = np.zeros((len(drafts), 2), dtype=np.int64)
        tokens = np.zeros((len(drafts), max((d.tokens.size for d in drafts if d is not None), default=0)), np.int64)
        for i, draft in enumerate(drafts):
            if draft is not None:
                found[i] = draft.match_length, draft.tokens.size
                tokens[i, : draft.tokens.size] = draft.tokens
        return Offers(found, tokens)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        # A stop rule is about a model's signals, and so are the trees beside it: drafts of counts stay chains there.
        rule = plan.tree if plan.stop is None else None
        most = plan.depth if rule is None else plan.nodes
        tokens = np.zeros((len(most), max(most, default=0)), dtype=np.int64)
        parents = None if rule is None else np.full(tokens.shape, -1, dtype=np.int64)
        lens = np.zeros(len(plan.depth), dtype=np.int64)
        skipped = {}
        with self._lock:
            for i, depth in enumerate(plan.depth):
                draft, lane = None, int(batch.lanes[i])
                if depth and rule is None:
                    draft = self._draft(batch.tokens, lane)
                elif depth and rule is not None and lane in self._lanes:
                    draft = self._lanes[lane].tree(batch.tokens[lane], most[i], Branching(rule.width, depth))
                if draft is not None and draft.tokens.size:
                    lens[i] = n = min(most[i], draft.tokens.size if rule is None else _worth(draft, rule))
                    tokens[i, :n] = draft.tokens[:n]
                    if parents is not None and draft.parents is not None:
                        parents[i, :n] = draft.parents[:n]
                elif depth:
                    skipped[batch.ids[i]] = "no_match"
        early_exit = np.zeros(lens.size, dtype=np.bool_)
        return Drafts(tokens, lens, parents=parents, early_exit=early_exit, skipped=skipped)

    def advance(self, step: TargetStep) -> None:
        """Nothing to keep: ``commit`` says what was accepted."""

    def commit(self, text: NewText) -> None:
        with self._lock:
            for lane, start, end in zip(text.lanes.tolist(), text.starts.tolist(), text.ends.tolist(), strict=True):
                self._lanes[lane].append(text.tokens[lane], start, end)

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        with self._lock:
            self._lanes[lane] = RequestText(self._settings, self._longest, self.cache, cache_salt)

    def evict(self, lane: int) -> None:
        with self._lock:
            self._lanes.pop(lane, None)

    def _draft(self, tokens: Int32, number: int) -> SuffixDraft | None:
        """Of a lane; None if its prompt is not complete."""
        lane = self._lanes.get(number)
        return None if lane is None else lane.draft(tokens[number])


def _worth(draft: SuffixDraft, rule: TreeRule) -> int:
    """Nodes of a tree until the survival of one is too low for its place; one at least."""
    below = np.array(rule.below)[np.minimum(np.arange(draft.tokens.size), len(rule.below) - 1)]
    low = np.flatnonzero(draft.probabilities[1:] < below[1:])
    return 1 + int(low[0]) if low.size else draft.tokens.size
