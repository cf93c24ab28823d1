"""How long a proposer may take, and how often it may fail, before it is switched off."""

from __future__ import annotations

from collections import deque
from statistics import median

_PASSES = 31
_LEAST_PASSES = 8
_DRAFTS = 15


class TargetPace:
    """Seconds of a target pass over decoding requests: the running median of the latest ones.

    Where drafts are verified in every pass, it is a little more than a plain pass takes, which errs towards patience.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_PASSES)

    def record(self, seconds: float) -> None:
        """A pass without prefill rows has been run."""
        self._latest.append(seconds)

    @property
    def seconds(self) -> float | None:
        """None until a few passes are known; the first ones load compiled code and are no measure."""
        return median(self._latest) if len(self._latest) >= _LEAST_PASSES else None


class Lateness:
    """Whether drafts are late as a rule. Single ones are where the machine is busy, or compiles what is used first."""

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=_DRAFTS)

    def add(self, late: bool) -> bool:
        """Counts a draft; returns whether most of the latest have been late."""
        self._latest.append(late)
        return late and 2 * sum(self._latest) > _DRAFTS


class Strikes:
    """Faults that add up, unless there are good drafts enough between them: those of hours ago do not count."""

    def __init__(self, most: int, forgotten_after: int) -> None:
        """
        Args:
            most: faults that make one too many.
            forgotten_after: good drafts in a row, after which all faults are forgotten.
        """
        self._most = most
        self._forgotten_after = forgotten_after
        self._faults = 0
        self._good = 0

    def good(self) -> None:
        """A draft was as it should be."""
        self._good += 1
        if self._good >= self._forgotten_after:
            self._faults = 0

    def fault(self) -> bool:
        """Counts one more; returns whether that is one too many."""
        self._good = 0
        self._faults += 1
        return self._faults >= self._most
