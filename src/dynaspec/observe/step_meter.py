"""What steps take and carry, and how many tokens a second they give."""

from __future__ import annotations

from dataclasses import dataclass

from dynaspec.contract.step import StepOutcome

from .buckets import ROWS, STEP_S
from .histogram import Histogram, HistogramCounts

RECENT_STEPS = 64
"""Steps over which the recent goodput is averaged, exponentially."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Totals over steps, and what the latest ones gave."""

    step_s: HistogramCounts
    batch_size: HistogramCounts
    """Decoding requests of steps that had any."""
    tokens: HistogramCounts
    """Prompt tokens computed and tokens emitted by decoding requests, in each step."""
    recent_goodput: float | None
    """Tokens a second of the latest steps without prefill, waiting between steps left out; None before the first."""


class StepMeter:
    """Written by the engine's thread only, which takes the snapshots too."""

    def __init__(self) -> None:
        self._step_s, self._batch_size, self._tokens = Histogram(STEP_S), Histogram(ROWS), Histogram(ROWS)
        self._recent_tokens = self._recent_s = 0.0

    def record(self, outcome: StepOutcome) -> None:
        """A step has been committed."""
        emitted, prefilled = sum(outcome.emitted), outcome.work.prefill_rows
        self._step_s.observe(outcome.step_s)
        self._tokens.observe(emitted + prefilled)
        if not outcome.ids:
            return
        self._batch_size.observe(len(outcome.ids))
        if not prefilled:  # controllers predict steps of decoding alone, so that is what can be compared
            keep = 1.0 - 1.0 / RECENT_STEPS
            self._recent_tokens = keep * self._recent_tokens + emitted
            self._recent_s = keep * self._recent_s + outcome.step_s

    def snapshot(self) -> StepTotals:
        return StepTotals(
            step_s=self._step_s.snapshot(),
            batch_size=self._batch_size.snapshot(),
            tokens=self._tokens.snapshot(),
            recent_goodput=self._recent_tokens / self._recent_s if self._recent_s else None,
        )
