"""Dynamic speculation lengths: drafting stops when the drafter is no longer confident.

The stop after each drafter pass is that of DISCO (Mamou et al., 2405.04304) in the simple form that
Transformers' assisted generation uses: a threshold on a probability.
"""

from __future__ import annotations

from typing import Literal

from dynaspec.contract.step import Scope, Signal, StepOutcome, StopRule

from .threshold import FittedThreshold


class ConfidenceStop:
    """Ends a draft after a token whose confidence is below the threshold.

    Args:
        longest: drafter passes that the rule must cover.
        threshold: in 0 … 1; 0 = never stop; ``auto`` = fitted to what is accepted.
        scope: each request stops by itself, or all do when the mean over those still drafting is below.
        signal: which probability is compared, see ``StopRule``.
    """

    def __init__(self, longest: int, *, threshold: float | Literal["auto"], scope: Scope, signal: Signal) -> None:
        self._longest = longest
        self._fit = FittedThreshold() if threshold == "auto" else None
        self._scope: Scope = scope
        self._signal: Signal = signal
        self.threshold = self._fit.value if self._fit else float(threshold)
        self.rule = self._rule()

    def observe(self, outcome: StepOutcome) -> None:
        """Fits the threshold anew, if it is ``auto``."""
        if self._fit is None:
            return
        self._fit.observe(outcome)
        if self._fit.value != self.threshold:
            self.threshold = self._fit.value
            self.rule = self._rule()

    def _rule(self) -> StopRule | None:
        if self.threshold == 0.0:
            return None
        return StopRule(below=(self.threshold,) * self._longest, scope=self._scope, signal=self._signal)
