"""Plain decoding or speculation: predictions, held against what steps really gave and took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["plain", "speculate", "probe_plain", "probe_draft"]

_FORGET = 0.99
_PRIOR_STEPS = 30.0
"""The prediction counts as confirmed by so many steps."""
_RETURN = 0.01
_SHORTEST, _LONGEST = 8, 256
"""Steps between two trials of drafting while decoding plainly; doubled after every trial that brought nothing."""
_FOLLOW_UP = 3
"""Steps to the next trial after one that brought something."""
_PLAIN_EVERY = ((1.05, 64), (1.2, 128), (1.5, 256), (float("inf"), 1024))
"""How often plain decoding is tried: (predicted advantage of speculation below, steps)."""
_OTHER_LOAD = 1.5
"""What trials of drafting have shown holds up to so many times the requests, or as many times fewer."""
_HYSTERESIS = 1.01
"""Speculation is taken up again when it promises this much; left when it promises less than plain decoding."""


class Ratio:
    """What steps of one mode gave a second, over what was predicted; 1 until there is evidence."""

    def __init__(self) -> None:
        self.value = 1.0
        self._tokens = self._seconds = _PRIOR_STEPS
        """Measured over predicted, summed over steps that grow old."""

    def observe(self, emitted: float, seconds: float, predicted_emitted: float, predicted_s: float) -> None:
        """One step; everything is taken relative to its prediction, so that steps of all sizes count alike."""
        self._tokens = _FORGET * self._tokens + emitted / predicted_emitted
        self._seconds = _FORGET * self._seconds + min(seconds / predicted_s, 2.0)
        self.value = self._tokens / self._seconds

    def rest(self) -> None:
        """A step of the other mode: what was measured grows old, and the prediction is trusted again."""
        self._tokens += _RETURN * (_PRIOR_STEPS - self._tokens)
        self._seconds += _RETURN * (_PRIOR_STEPS - self._seconds)
        self.value = self._tokens / self._seconds


@dataclass(slots=True)
class Prediction:
    """What a planned step was expected to give and take."""

    drafts: bool
    emitted: float
    seconds: float


class PlainGuard:
    """Decides the mode of each step. Counts steps, no clock."""

    def __init__(self) -> None:
        self.speculation = Ratio()
        self.plain = Ratio()
        self.mode: Mode = "speculate"
        self.speculating = True
        self._since_plain = 0
        self._until_trial = _SHORTEST
        self._pause = _SHORTEST
        self._load = 0

    def decide(self, speculative: float, plain: float, load: int = 1) -> Mode:
        """The mode of the next step.

        Args:
            speculative: predicted tokens/s of the best plan with drafts; 0 if there is none.
            plain: predicted tokens/s of plain decoding.
            load: requests.
        """
        if self._load > _OTHER_LOAD * load or load > _OTHER_LOAD * self._load:
            self._load, self._pause = load, _SHORTEST
            self._until_trial = min(self._until_trial, _SHORTEST)
        advantage = speculative * self.speculation.value / (plain * self.plain.value)
        if advantage > (1.0 if self.speculating else _HYSTERESIS):
            if not self.speculating:
                self.speculating, self._pause = True, _SHORTEST
            self._since_plain += 1
            self.mode = "probe_plain" if self._since_plain >= _plain_every(advantage) else "speculate"
        else:
            if self.speculating:
                self.speculating, self._until_trial = False, self._pause
            self._until_trial -= 1
            self.mode = "probe_draft" if self._until_trial <= 0 else "plain"
        if self.mode == "probe_plain":
            self._since_plain = 0
        elif self.mode == "probe_draft":
            self._until_trial = self._pause = min(2 * self._pause, _LONGEST)
        return self.mode

    def tried(self, paid: bool) -> None:
        """Whether a trial of drafting gave more tokens a second than plain decoding."""
        if paid and not self.speculating:
            self._until_trial = min(self._until_trial, _FOLLOW_UP)
            self._pause = _SHORTEST

    def observe(self, prediction: Prediction, emitted: int, seconds: float) -> None:
        """A step without prefill has ended."""
        used, other = (self.speculation, self.plain) if prediction.drafts else (self.plain, self.speculation)
        used.observe(float(emitted), seconds, prediction.emitted, prediction.seconds)
        other.rest()


def _plain_every(advantage: float) -> int:
    """Steps of speculation to a trial of plain decoding."""
    for below, steps in _PLAIN_EVERY:
        if advantage < below:
            return steps
    return _PLAIN_EVERY[-1][1]
