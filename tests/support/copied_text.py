"""A decode loop of texts that copy parts of themselves: a lookup drafts those, and a model the rest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import Controller, Limits, ProposerTraits, SpecPlan, StepView
from dynaspec.control.planner import ChainPlanner
from dynaspec.control.policies.wrappers import PlainController

from .closed_loop import LIMITS, LONGEST, SMALL_PAIR, Loop

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LOOKUP = ProposerTraits("ngram", "none", has_confidence=False)
BOTH = replace(LIMITS, proposers=(ProposerTraits("draft_model", probe_context=True), LOOKUP))
COSTS = replace(
    SMALL_PAIR.costs(), drafters=(SMALL_PAIR.costs().drafters[0], ()), first_s=(SMALL_PAIR.costs().first_s[0], 0.0)
)
_CHANCE = 0.15
"""Of a match in new text, and of each token that such a match drafts."""


@dataclass(frozen=True)
class Texts:
    """Stretches of new and of copied tokens take turns; their lengths are exponential."""

    new: float
    """Mean length."""
    copied: float
    quality: float
    """Of the model's drafts."""


TEXTS = {
    "few copies": Texts(40, 15, 0.9),
    "half copied": Texts(15, 30, 0.9),
    "mostly copied": Texts(8, 60, 0.9),
    "half copied, the model is bad": Texts(15, 30, 0.2),
}


STEPS = 400
_LONG = (LONGEST + 1) * STEPS
"""Tokens of a text: more than are emitted."""


@cache
def _found(texts: Texts, requests: int, seed: int) -> tuple[Ints, Ints]:
    """[requests, _LONG] What a lookup finds before each token: the match's length, and how many tokens are right that
    it drafts."""
    match, right = zip(*(_text(texts, 1000 * seed + request, _LONG) for request in range(requests)), strict=True)
    return np.array(match), np.array(right)


def _text(texts: Texts, seed: int, tokens: int) -> tuple[Ints, Ints]:
    """[tokens] Of one request. The first copied token has no match yet."""
    rng, at, copying = np.random.default_rng(seed), 0, False
    match, right = np.zeros(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.int64)
    while at < tokens:
        length = min(1 + int(rng.exponential(texts.copied if copying else texts.new)), tokens - at)
        here = slice(at, at + length)
        if copying:
            match[here], right[here] = np.minimum(np.arange(length), LONGEST), length - np.arange(length)
        else:
            match[here] = np.where(rng.random(length) < _CHANCE, rng.integers(1, 4, length), 0)
            right[here] = rng.geometric(1.0 - _CHANCE, length) - 1
        at, copying = at + length, not copying
    return match, right


@dataclass(slots=True)
class CopyingLoop(Loop):
    """Every request has a text of its own, which is the same whatever is drafted."""

    limits: Limits = BOTH
    noise: float = 0.05
    texts: Texts = TEXTS["half copied"]
    at: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[B] tokens so far."""

    def _offers(self, count: int) -> tuple[tuple[tuple[int, int], ...] | None, ...]:
        if self.at.size != count:
            self.at = np.zeros(count, dtype=np.int64)
        return None, tuple((match, LONGEST if match else 0) for match in self._here(0).tolist())

    def _came_true(self, emitted: Ints) -> tuple[tuple[tuple[int, int, int], ...] | None, ...]:
        match = self._here(0)
        compared = np.where(match > 0, np.minimum(emitted, LONGEST), 0)
        return None, tuple(map(tuple, np.stack([match, compared, np.minimum(compared, self._here(1))], 1).tolist()))

    def _go_on(self, emitted: Ints) -> None:
        self.at = self.at + emitted

    def _draft(
        self, rng: np.random.Generator, step: int, plan: SpecPlan
    ) -> tuple[Ints, Floats, Floats, npt.NDArray[np.bool_]]:
        looked_up = (np.array(plan.proposer) == 1) & (np.array(plan.depth) > 0)
        modelled = plan.with_depth(tuple(np.where(looked_up, 0, plan.depth).tolist()))
        lens, confidence, chance, right = super(CopyingLoop, self)._draft(rng, step, modelled)
        more = max(plan.depth, default=0) - chance.shape[1]
        confidence, chance, right = (np.pad(table, ((0, 0), (0, more))) for table in (confidence, chance, right))
        copied = np.arange(chance.shape[1]) < self._here(1)[:, None]
        lens = np.where(looked_up, plan.depth, lens)
        return (
            lens,
            np.where(looked_up[:, None], 1.0, confidence),
            np.where(looked_up[:, None], copied, chance),
            np.where(looked_up[:, None], copied, right),
        )

    def _here(self, column: int) -> Ints:
        """[B] Of ``_found``."""
        return _found(self.texts, self.at.size, self.seed)[column][np.arange(self.at.size), self.at]


@dataclass(frozen=True)
class Mix:
    """What an operator could set: a length for the model's drafts, another for lookups, and the shortest match."""

    model: int
    lookup: int
    match: int


_BEST = ((0, 3, 4), (0, 5, 4), (0, 7, 2), (0, 7, 4), (0, 15, 2), (2, 7, 4), (2, 15, 2), (3, 7, 2), (3, 15, 2))
MIXES = tuple(Mix(*mix) for mix in _BEST)
"""Of all with 0, 2 or 3 and 3, 5, 7 or 15 tokens and matches of 2 or 4, those that are best for a text at a load."""


class FixedMix(PlainController):
    """A lookup where its match is long enough, else the model."""

    def __init__(self, mix: Mix) -> None:
        self._planner, self._mix = ChainPlanner(BOTH), mix

    def plan(self, view: StepView) -> SpecPlan:
        mix = self._mix
        matches = [match >= mix.match for match, _ in view.offers[1] or ()]
        depth = [mix.lookup if found else mix.model for found in matches]
        return self._planner.plan(view, depth, None, tuple(map(int, matches)))


@cache
def mixed_goodput(mix: Mix, texts: Texts, requests: int, seed: int) -> float:
    """Tokens/s."""
    return goodput(FixedMix(mix), texts, requests, seed)


def goodput(controller: Controller, texts: Texts, requests: int, seed: int) -> float:
    """Tokens/s over ``STEPS`` steps."""
    loop = CopyingLoop(requests, seed, lambda step, request: texts.quality, texts=texts)
    return loop.run(controller, STEPS).goodput
