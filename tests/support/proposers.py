"""Proposers for tests: one that drafts from a script, and a base for those that misbehave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dynaspec.contract.proposer import DecodeBatch, Drafts, NewText, Offers, ProposerNeeds, TargetStep
from dynaspec.contract.step import ProposerTraits, SpecPlan


class ScriptedProposer:
    """Drafts what is known to come, with some tokens wrong, in lengths drawn anew in every step (0 too)."""

    traits = ProposerTraits(name="scripted")
    needs = ProposerNeeds()

    def __init__(
        self,
        texts: Iterable[Sequence[int]],
        vocab_size: int,
        *,
        right: float = 0.8,
        fixed_length: bool = False,
        seed: int = 0,
    ) -> None:
        """
        Args:
            texts: prompts with their continuations, as token ids.
            right: probability that a drafted token is the known one.
            fixed_length: always draft what was granted.
        """
        self._texts = [np.asarray(text, dtype=np.int64) for text in texts]
        self._vocab_size = vocab_size
        self._right = right
        self._fixed_length = fixed_length
        self._random = np.random.default_rng(seed)

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return (0,) * len(batch.ids)

    def peek(self, batch: DecodeBatch) -> Offers | None:
        return None

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        depth = np.array(plan.depth, dtype=np.int64)
        shape = (depth.size, int(depth.max(initial=0)))
        lens = depth if self._fixed_length else self._random.integers(0, depth + 1)
        tokens = self._random.integers(0, self._vocab_size, shape)
        right = self._random.random(shape) < self._right
        for i, (lane, length) in enumerate(zip(batch.lanes, batch.lengths, strict=True)):
            known = self._known(batch.tokens[lane, :length])[: shape[1]]
            tokens[i, : known.size] = np.where(right[i, : known.size], known, tokens[i, : known.size])
        tokens[np.arange(shape[1]) >= lens[:, None]] = 0
        return Drafts(
            tokens=tokens,
            lens=lens,
            confidence=self._random.random(shape, dtype=np.float32),
            early_exit=lens < depth,
        )

    def advance(self, step: TargetStep) -> None:
        """Nothing to keep."""

    def commit(self, text: NewText) -> None:
        """Nothing to keep."""

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        """Nothing to keep."""

    def evict(self, lane: int) -> None:
        """Nothing to keep."""

    def _known(self, committed: np.ndarray) -> np.ndarray:
        for text in self._texts:
            if text.size > committed.size and np.array_equal(text[: committed.size], committed):
                return text[committed.size :]
        return np.zeros(0, dtype=np.int64)
