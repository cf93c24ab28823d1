"""Prompt lookup: drafts what followed when the text's end occurred before (Saxena, "Prompt Lookup Decoding", 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynaspec.contract.proposer import DecodeBatch, Drafts, NewText, ProposerNeeds, TargetStep
from dynaspec.contract.step import ProposerTraits, SpecPlan

from .match import longest_match, longest_matches

_PEEK_TOKENS = 64


class NgramProposer:
    """Looks the last tokens up in the request's own prompt and output. Stateless, so it never lags."""

    traits = ProposerTraits(name="ngram", passes_per_draft="none", has_confidence=False)
    needs = ProposerNeeds()

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return (0,) * len(batch.ids)

    def peek(self, batch: DecodeBatch) -> tuple[tuple[int, int], ...]:
        found = longest_matches(batch.tokens, batch.lanes, batch.lengths, self._min_n, self._max_n, _PEEK_TOKENS)
        return tuple(map(tuple, found.tolist()))

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        drafts = Drafts(
            tokens=np.zeros((len(plan.depth), max(plan.depth, default=0)), dtype=np.int64),
            lens=np.zeros(len(plan.depth), dtype=np.int64),
            early_exit=np.zeros(len(plan.depth), dtype=np.bool_),
            skipped={},
        )
        for i, depth in enumerate(plan.depth):
            if depth:
                self._look_up(batch, i, depth, drafts)
        return drafts

    def advance(self, step: TargetStep) -> None:
        """Nothing to keep: the next look-up reads the committed tokens."""

    def commit(self, text: NewText) -> None:
        """Nothing to keep."""

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        """Nothing to keep."""

    def evict(self, lane: int) -> None:
        """Nothing to keep."""

    def _look_up(self, batch: DecodeBatch, i: int, depth: int, drafts: Drafts) -> None:
        text, length = batch.tokens[batch.lanes[i]], int(batch.lengths[i])
        n, start = longest_match(text, length, self._min_n, self._max_n, depth)
        found = min(depth, length - start)
        if n == 0 and drafts.skipped is not None:
            drafts.skipped[batch.ids[i]] = "no_match"
        drafts.tokens[i, :found] = text[start : start + found]
        drafts.lens[i] = found
