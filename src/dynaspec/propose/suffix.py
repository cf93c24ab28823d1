"""Suffix decoding: drafts what has followed the text's end most often, in the request's own text or in the answers of
others (Oliaro et al. 2411.04975; option names and defaults are vLLM's)."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt

from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import DecodeBatch, Drafts, KeptText, NewText, ProposerNeeds, TargetStep
from dynaspec.contract.step import SpecPlan, TreeRule
from dynaspec.control.keys import SuffixSettings

from .response_cache import ResponseCache
from .suffix_tree import Branching, SuffixDraft, SuffixTree

Int32 = npt.NDArray[np.int32]


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

    def peek(self, batch: DecodeBatch) -> tuple[tuple[int, int], ...]:
        with self._lock:
            drafts = [self._draft(batch.tokens, lane) for lane in batch.lanes.tolist()]
        return tuple([(0, 0) if d is None else (d.match_length, d.tokens.size) for d in drafts])

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
