"""Dynamic speculative decoding: the draft length with the best goodput, by batch size and acceptance.

The objective AL(k) / ITL(batch size, k) over a measured profile is that of SmartSpec (Liu et al., 2406.14066) as vLLM's
dynamic speculative decoding has it (vllm-project/vllm pull request 32374).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.contract.signals import conditional
from dynaspec.contract.step import StepOutcome, StepView
from dynaspec.control.estimate.acceptance import AcceptanceModel
from dynaspec.control.estimate.settings import AutoSettings
from dynaspec.control.profile import Profile

from .lengths import Range, joined

_SETTINGS = AutoSettings(prior_information=0.06, memory=512.0, surprise=1e9, request_shrinkage=1e9)
"""The profile's rate counts for about one verdict: a position seen once is not yet known. All verdicts are forgotten
alike: to forget what surprises is to go back to the profile, which may be what is wrong. Requests do not differ."""
_STALE = 2048
"""Steps after which a position that no draft has reached any more is as the profile says again."""


class Goodput:
    """k* = argmax AL(k) / ITL(batch size, k), the smallest on ties; batch size = decoding requests.

    Args:
        profile: step times, and acceptance until (or unless) it is measured.
        cap: longest draft; the profile's own maximum holds too.
        lengths: draft lengths that can run, 0 among them.
    """

    def __init__(self, profile: Profile, cap: int, lengths: Sequence[int]) -> None:
        self._profile = profile
        self._cap = cap
        self._lengths = tuple(lengths)
        self._measured = OnlineRates(profile.acceptance_rate_per_pos) if profile.is_online else None
        self._rates = profile.acceptance_rate_per_pos
        self._best: dict[int, int] = {}

    def length(self, view: StepView) -> int:
        batch = max(1, len(view.ids))
        best = self._best.get(batch)
        if best is None:
            best = self._best[batch] = self._profile.best_length(batch, self._rates, self._cap, among=self._lengths)
        return best

    def observe(self, outcome: StepOutcome) -> None:
        if self._measured is None:
            return
        self._measured.observe(outcome)
        if self._measured.steps >= self._profile.warmup_steps:
            self._rates = self._measured.rates()
            self._best.clear()

    def estimates(self) -> Mapping[str, Any]:
        return {"acceptance_rate_per_pos": list(self._rates)}


class OnlineRates:
    """Acceptance per position as it is measured; where no draft has been lately, the profile's.

    The rate of position j is the product a_1 … a_j of conditional ones, each learnt from the drafts that reached the
    position: those whose earlier tokens were all accepted and whose token there was verified. So drafts that were too
    short say nothing about it. Every position has an ``AcceptanceModel`` of its own: within one, a position that no
    draft reached would follow those before it, and leave what the profile says.

    Args:
        profile: unconditional rate per position.
    """

    def __init__(self, profile: Sequence[float]) -> None:
        self._profile = conditional(profile)
        self._models: dict[int, AcceptanceModel] = {}
        self._reached: dict[int, int] = {}
        self._now = 0
        self.steps = 0
        """Observed steps in which something was drafted."""

    def observe(self, outcome: StepOutcome) -> None:
        """Takes in a step's verified drafts."""
        self._now += 1
        self.steps += any(outcome.drafted)
        accepted = np.array(outcome.accepted, dtype=np.int64)
        # Only a refusal says something about the next position; a draft's end or the request's does not.
        tested = accepted + np.array([end in ("rejected", "invalid") for end in outcome.ended], dtype=np.int64)
        for position in range(min(int(tested.max(initial=0)), len(self._profile))):
            self._learn(position, (accepted > position)[tested > position])
        for position in [j for j, reached in self._reached.items() if self._now - reached > _STALE]:
            del self._models[position], self._reached[position]

    def rates(self) -> tuple[float, ...]:
        """Unconditional acceptance per position, non-increasing."""
        models = self._models
        chances = (models[j].chance(0) if j in models else known for j, known in enumerate(self._profile))
        return tuple(accumulate(chances, mul))

    def _learn(self, position: int, right: npt.NDArray[np.bool_]) -> None:
        """What became of the drafts that reached a position [n]."""
        model = self._models.get(position)
        if model is None:
            model = self._models[position] = _model(self._profile[position])
        one = np.ones(right.size, dtype=np.int64)
        model.observe(one - 1, one, one, right.astype(np.int64), np.zeros(right.size))
        self._reached[position] = self._now


def _model(chance: float) -> AcceptanceModel:
    """Of one position, and of all requests alike: they share a slot, which next to nothing is made of."""
    model = AcceptanceModel(_SETTINGS, rates=(chance,), signal=False)
    model.admit(0)
    return model


def schedule_of(profile: Profile, cap: int, max_batch: int) -> list[Range]:
    """The k of every batch size from 1 to ``max_batch`` at the profile's own rates, as ranges (low, high, k)."""
    return list(joined(_lengths(profile, cap, max_batch)))


def _lengths(profile: Profile, cap: int, max_batch: int) -> Iterator[Range]:
    rates = profile.acceptance_rate_per_pos
    return ((batch, batch, profile.best_length(batch, rates, cap)) for batch in range(1, max_batch + 1))
