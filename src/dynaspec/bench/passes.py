"""Passes and time of decoding a known text one request at a time, under any rule for draft lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import ProposerTraits
from dynaspec.contract.work import Drafting
from dynaspec.control.estimate.costs import Measured, StepCosts
from dynaspec.control.estimate.settings import AutoSettings

from .rollout import Floats, Ints, Rollouts

_EPOCHS = 8
"""Times that the few lengths are taught: as medians, they are surer than single steps."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One verification step. It emits one token more than it accepts, or the accepted ones if the last ends the text,
    of which one less counts here."""

    drafted: int
    accepted: int
    looked_up: int = 0
    """Drafted tokens that were found in the text, without a drafter pass."""


Walk = tuple[Iteration, ...]


@dataclass(frozen=True, slots=True)
class KnownText:
    """A greedy continuation of n tokens, and what the drafter makes of it."""

    rollouts: Rollouts
    max_tokens: int
    """What the request may have: the engine drafts up to its end, not knowing where the text ends."""

    @property
    def tokens(self) -> int:
        return len(self.rollouts.runs)


def walk(text: KnownText, lengths: Ints) -> Walk:
    """The steps that decode a text. Its first token comes from the prompt's pass, which is not counted.

    Args:
        lengths: [n] draft length that the rule takes at each position.
    """
    runs, n = text.rollouts.runs.tolist(), text.tokens
    wanted = lengths.tolist()
    steps = []
    at = 1
    while at < n:
        drafted = min(wanted[at], text.max_tokens - at - 1)
        accepted = min(drafted, runs[at], n - at - 1)  # behind the text's end nothing counts
        steps.append(Iteration(drafted, accepted))
        at += accepted + 1
    return tuple(steps)


def fixed(text: KnownText, k: int) -> Walk:
    """Always k tokens."""
    return walk(text, np.full(text.tokens, k, dtype=np.int64))


def oracle(text: KnownText) -> Walk:
    """Drafts exactly to the first mismatch: all that is accepted, and nothing that is not."""
    left = text.tokens - 1 - np.arange(text.tokens)
    return walk(text, np.minimum(text.rollouts.runs, left))


def stopped(signal: Floats, below: npt.ArrayLike) -> Ints:
    """[n, longest] → [n]: draft lengths when drafting ends after the first token whose signal is below.

    Args:
        below: one threshold, or one a position.
    """
    low = signal < np.asarray(below)
    lengths: Ints = np.where(low.any(axis=1), low.argmax(axis=1) + 1, signal.shape[1]).astype(np.int64)
    return lengths


def fit_costs(seconds: Mapping[int, float], row_s: float, pass_s: float) -> StepCosts:
    """What the steps of one request cost, taught with those of fixed draft lengths.

    Args:
        seconds: of a step that drafts so many tokens, k drafter passes and one target pass; 0 = plain decoding.
        row_s: of another row of the target's pass; 0 = next to nothing.
        pass_s: of a drafter pass; 0 = not known.
    """
    curve = tuple((1 + k, seconds[0] + k * row_s) for k in sorted(seconds))
    measured = PassCosts(curve, (((1, pass_s),) if pass_s else (),))
    costs = StepCosts(measured, (ProposerTraits("draft_model"),), AutoSettings(drift=0.0))
    for _ in range(_EPOCHS):
        for k in sorted(seconds):
            drafter = (0, k, k) if k else (-1,)
            costs.observe(Measured(1 + k, 0.0, 0.0, seconds[k], -1.0, *drafter))
    return costs


def step_s(costs: StepCosts, drafted: int, looked_up: int = 0) -> float:
    """Seconds of a step; a token that was looked up is a row of the target's pass and no drafter pass."""
    drafting = _drafting(drafted - looked_up)
    return costs.target_s(1 + drafted, 0.0, 0.0) + (0.0 if drafting is None else costs.draft_s(drafting))


def total_s(steps: Iterable[Iteration], costs: StepCosts) -> float:
    """Seconds of all of them."""
    alike = Counter((step.drafted, step.looked_up) for step in steps)
    return sum(count * step_s(costs, *step) for step, count in alike.items())


def _drafting(passes: int) -> Drafting | None:
    return Drafting(0, passes, passes) if passes else None


@dataclass(frozen=True, slots=True)
class Passes:
    """What decoding took, in passes."""

    target: int
    drafter: int
    tokens: int
    """Emitted by these steps."""

    @classmethod
    def of(cls, steps: Sequence[Iteration]) -> Passes:
        drafter = sum(s.drafted - s.looked_up for s in steps)
        return cls(len(steps), drafter, sum(s.accepted + 1 for s in steps))


def tokens_per_second(walks: Sequence[Walk], costs: StepCosts) -> float:
    """Of several texts one after the other."""
    steps = [step for of_text in walks for step in of_text]
    return Passes.of(steps).tokens / total_s(steps, costs)
