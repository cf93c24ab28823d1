"""What steps were expected to give and take, and how that compares with what they gave and took."""

from __future__ import annotations

from dataclasses import dataclass

_FORGET = 0.998
"""Long, so that a slow moment weighs little: what it takes to notice that the machine has become slower is the first
steps of some hundred."""
_PRIOR_STEPS = 60.0
"""What was expected at first counts as confirmed by so many steps."""
_RETURN = 0.0005


class Ratio:
    """What steps of one mode gave a second, over what was predicted."""

    def __init__(self, expected: float = 1.0) -> None:
        """
        Args:
            expected: the ratio, until there is evidence.
        """
        self.value = self._expected = expected
        self._tokens, self._seconds = expected * _PRIOR_STEPS, _PRIOR_STEPS
        """Measured over predicted, summed over steps that grow old."""

    def observe(
        self, emitted: float, seconds: float, predicted_emitted: float, predicted_s: float, weight: float = 1.0
    ) -> None:
        """One step; everything is taken relative to its prediction, so that steps of all sizes count alike."""
        keep = _FORGET**weight
        self._tokens = keep * self._tokens + weight * emitted / predicted_emitted
        self._seconds = keep * self._seconds + weight * min(seconds / predicted_s, 2.0)
        self.value = self._tokens / self._seconds

    def rest(self, steps: float = 1.0) -> None:
        """Steps of the other mode: what was measured grows old."""
        share = min(1.0, _RETURN * steps)
        self._tokens += share * (self._expected * _PRIOR_STEPS - self._tokens)
        self._seconds += share * (_PRIOR_STEPS - self._seconds)
        self.value = self._tokens / self._seconds


@dataclass(slots=True)
class Prediction:
    """What a planned step was expected to give and take."""

    drafts: bool
    """A model drafts, or a lookup that stands alone."""
    emitted: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens/s; 0 where nothing was predicted."""
        return self.emitted / self.seconds if self.seconds else 0.0

    def steps_lost(self, emitted: int, seconds: float) -> float:
        """What a step took beyond what its tokens would have taken in steps like this one, in such steps."""
        return seconds / self.seconds - emitted / self.emitted
