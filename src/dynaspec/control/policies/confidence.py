"""Dynamic speculation lengths: drafting stops when the drafter is no longer confident.

The stop after each drafter pass is that of DISCO (Mamou et al., 2405.04304) in the simple form that
Transformers' assisted generation uses: a threshold on a probability.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import Scope, Signal, StepOutcome, StopRule

START = 0.4
"""Until there are enough observations; Transformers' default."""
WINDOW = 1024
"""Latest observations that count, so that the fit follows the traffic."""
MIN_OBSERVATIONS = 32
MIN_OF_EACH = 4
"""Accepted, and rejected, tokens without which a rate means nothing."""
REFIT_EVERY = 32
"""New observations between two fits, which bounds their cost."""
MISS_WEIGHT = 3.0
"""A token that would have been accepted but was not drafted costs this many needless ones."""


class FittedThreshold:
    """τ that minimises FPR(τ) + 3·FNR(τ) over the latest (confidence, accepted) observations.

    The criterion is that of Transformers' ``AssistedCandidateGenerator.update_candidate_strategy``, which
    reads it off the ROC curve. FPR: share of the rejected tokens with confidence ≥ τ; FNR: share of the
    accepted ones with confidence < τ.

    Of each draft only the accepted tokens and the first rejected one are observations; what lay behind it was
    never tested against the right context. Tokens below τ are observed too, since the token that ends a draft
    is kept and verified: a threshold that is too high finds its way down.
    """

    def __init__(self) -> None:
        self.value = START
        self._confidence = np.zeros(WINDOW)
        self._accepted = np.zeros(WINDOW, dtype=np.bool_)
        self._count = 0
        self._unfitted = 0

    def observe(self, outcome: StepOutcome) -> None:
        """Takes in a step's verified tokens; fits anew when enough have gathered."""
        confidence: list[float] = []
        accepted: list[bool] = []
        columns = zip(outcome.confidence, outcome.accepted, outcome.ended, strict=True)
        for signal, length, ended in columns:
            verdicts = [True] * length + [False] * (ended == "rejected")
            seen = signal[: len(verdicts)]
            confidence.extend(seen)
            accepted.extend(verdicts[: len(seen)])
        if confidence:
            self._append(np.asarray(confidence), np.asarray(accepted))
        if self._unfitted >= REFIT_EVERY:
            self._fit()

    def _append(self, confidence: npt.NDArray[np.float64], accepted: npt.NDArray[np.bool_]) -> None:
        finite = np.isfinite(confidence)
        confidence, accepted = confidence[finite][-WINDOW:], accepted[finite][-WINDOW:]
        where = (self._count + np.arange(confidence.size)) % WINDOW
        self._confidence[where] = confidence
        self._accepted[where] = accepted
        self._count += confidence.size
        self._unfitted += confidence.size

    def _fit(self) -> None:
        size = min(self._count, WINDOW)
        confidence, accepted = self._confidence[:size], self._accepted[:size]
        hits = int(accepted.sum())
        if size < MIN_OBSERVATIONS or min(hits, size - hits) < MIN_OF_EACH:
            return
        self.value = best_threshold(confidence, accepted)
        self._unfitted = 0


def best_threshold(confidence: npt.NDArray[np.float64], accepted: npt.NDArray[np.bool_]) -> float:
    """The observed confidence τ that minimises FPR(τ) + 3·FNR(τ); the lowest one on ties.

    Args:
        confidence: [n] in 0 … 1, n > 0.
        accepted: [n], with at least one accepted and one rejected token.
    """
    order = np.argsort(confidence, kind="stable")
    candidates, hit = confidence[order], accepted[order]
    # For a threshold at candidate i, tokens i … n − 1 pass; equal confidences pass together.
    first = np.searchsorted(candidates, candidates, side="left")
    hits_below = np.concatenate(([0], np.cumsum(hit)))[first]
    misses_below = first - hits_below
    hits = int(hit.sum())
    misses = hit.size - hits
    cost = (misses - misses_below) / misses + MISS_WEIGHT * hits_below / hits
    return float(candidates[int(np.argmin(cost))])


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
