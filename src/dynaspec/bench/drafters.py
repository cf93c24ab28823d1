"""Drafters for measurements: one that costs what a real one does and is no use, and one that always drafts in full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints, NewText, Proposer, ProposerNeeds, TargetStep
from dynaspec.contract.step import LOGIT_RANGE, ProposerTraits, SpecPlan
from dynaspec.propose.stopping import stop_mask

CONFIDENT = 0.98
"""What an adversarial drafter says of each of its tokens."""
_FILLER = 1
"""Token that fills drafts up."""


class Wrapped:
    """Passes everything on to another proposer."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.traits: ProposerTraits = inner.traits
        self.needs: ProposerNeeds = inner.needs

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return self.inner.lag(batch)

    def peek(self, batch: DecodeBatch) -> tuple[tuple[int, int], ...] | None:
        return self.inner.peek(batch)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        return self.inner.propose(batch, plan)

    def advance(self, step: TargetStep) -> None:
        self.inner.advance(step)

    def commit(self, text: NewText) -> None:
        self.inner.commit(text)

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        self.inner.admit(lane, cached_blocks, cache_salt)

    def evict(self, lane: int) -> None:
        self.inner.evict(lane)


class Adversarial(Wrapped):
    """A real drafter's cost, for nothing: its tokens are replaced by random ones, of which it claims to be sure.

    It drafts as long as a drafter does that is so sure of itself: a stop rule sees what it claims. For greedy decoding,
    as the distributions that drafts were drawn from are dropped.
    """

    def __init__(self, inner: Proposer, vocab_size: int, *, seed: int = 0) -> None:
        super().__init__(inner)
        self.active = True
        """False: the drafter is as good as it ever was."""
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        if not self.active:
            return self.inner.propose(batch, plan)
        granted = np.array(plan.depth, dtype=np.int64)
        lens = lengths_when_sure(plan, CONFIDENT)
        drafts = self.inner.propose(batch, replace(plan.with_depth(tuple(lens.tolist())), stop=None))
        drafted = np.arange(drafts.tokens.shape[1]) < drafts.lens[:, None]
        # Never the token that the drafter means, which may well be right.
        other = self._random.integers(1, self._vocab_size, drafts.tokens.shape)
        drafts.tokens = np.where(drafted, (drafts.tokens + other) % self._vocab_size, 0)
        if drafts.confidence is not None:
            drafts.confidence = np.where(drafted, np.float32(CONFIDENT), drafts.confidence)
        drafts.early_exit = (lens < granted) & (drafts.lens == lens)
        drafts.q = None
        return drafts


class Padded(Wrapped):
    """Drafts as many tokens as were granted: what a lookup does not find is filled with a token.

    So the time of a step with drafts of k tokens can be measured where the text offers none.
    """

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        drafts = self.inner.propose(batch, plan)
        lens = np.array(plan.depth, dtype=np.int64)
        places = np.arange(int(lens.max(initial=0)))
        tokens = np.full((lens.size, places.size), _FILLER, dtype=np.int64)
        width = min(drafts.tokens.shape[1], places.size)
        found = places[:width] < drafts.lens[:, None]
        tokens[:, :width] = np.where(found, drafts.tokens[:, :width], _FILLER)
        tokens[places >= lens[:, None]] = 0
        no_exit = np.zeros(lens.size, np.bool_)
        return replace(
            drafts, tokens=tokens, lens=lens, confidence=None, signal=None, repeat_bonus=None, early_exit=no_exit
        )


def lengths_when_sure(plan: SpecPlan, confidence: float) -> Ints:
    """[B] how far a plan lets a drafter go that says ``confidence`` of each of its tokens."""
    depth = np.array(plan.depth, dtype=np.int64)
    drafting = np.flatnonzero(depth)
    if depth.max(initial=0) <= 1:
        return depth  # a rule is asked after a token
    rule = None if plan.stop is None else plan.stop.select(drafting.tolist())
    mask = stop_mask(rule, depth[drafting], torch.device("cpu"))
    signal = confidence
    if rule is not None and rule.signal == "survival":
        signal = min(math.log(confidence / (1.0 - confidence)), LOGIT_RANGE)
    running = np.arange(drafting.size)
    for done in range(1, int(depth.max()) + 1):
        mask.update(done, running, torch.full((running.size,), signal))
        running = mask.running(done)
        if not running.size:
            break
    lengths = depth.copy()
    lengths[drafting] = mask.lengths()
    return lengths
