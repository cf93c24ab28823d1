"""When what is believed of a drafter is not believable any more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dynaspec.contract.step import StepOutcome

from .drafter import Drafter

_UNBELIEVABLE = 8.0
"""− log of the chance of what was seen from which on what is believed of a drafter is doubted: 1 in 3,000. It is asked
after every step, and what four requests lose at once costs a hundred steps of plain decoding."""
_LITTLE = 0.5
"""Chance of a token of which not much was expected."""
_LEAST_CHANCE = 1e-9
"""Nothing is impossible."""


class Doubt:
    """Watches what comes of drafts, step by step, before anything is learnt of it."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self.failures = 0
        """Steps with drafts on end in which nothing was accepted; steps without drafts between them do not count."""
        self._surprise = 0.0
        """− log of how likely they were."""

    def watch(self, outcome: StepOutcome, *, trial: bool) -> None:
        """A step has ended. Doubted is who drafted in steps on end of which nothing was accepted, or in a trial of
        which something was although little was expected of it."""
        if not trial and any(outcome.accepted):
            self.failures = 0
            return
        drafted = [p for p, n in zip(outcome.proposer, outcome.drafted, strict=True) if n]
        if not drafted:
            return
        if not any(outcome.accepted):
            misses = (max(_LEAST_CHANCE, 1.0 - self._drafters[index].chance()) for index in drafted)
            before = self._surprise if self.failures else 0.0
            self._surprise = before - sum(map(math.log, misses))
            self.failures += 1
            doubtful = self._surprise >= _UNBELIEVABLE
        else:
            self.failures = 0
            doubtful = trial and min(self._drafters[index].chance() for index in drafted) < _LITTLE
        if doubtful:
            self._surprise = 0.0
            for index in set(drafted):
                self._drafters[index].doubt()
