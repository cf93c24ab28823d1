"""Suffix decoding: drafts what has followed the text's end most often, in the request's own text or in the answers of
others (Oliaro et al. 2411.04975; option names and defaults are vLLM's).

Answers of earlier requests are kept in one suffix tree for each cache salt, bounded in all together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import numpy.typing as npt

from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import DecodeBatch, Drafts, KeptText, NewText, Offers, ProposerNeeds, TargetStep
from dynaspec.contract.step import SpecPlan, TreeRule
from dynaspec.control.keys import SuffixSettings

from .suffix_tree import Branching, SuffixDraft, SuffixTree, load_kernels

Int32 = npt.NDArray[np.int32]


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
