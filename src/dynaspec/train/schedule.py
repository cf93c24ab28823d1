"""How far a run has come, and the learning rate that goes with it: warm-up, stable, decay.

The stable phase has no end of its own, so a run can be extended from the checkpoint that is kept
before the decay begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from dynaspec.contract.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up over ``warmup_steps``, then 1, then linear to 0 over the last ``decay_share`` of the run."""

    warmup_steps: int
    decay_share: float

    def factor(self, step: int, progress: float) -> float:
        """Multiplier of the peak learning rate before step ``step`` at ``progress`` (0 … 1)."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if not self.decaying(progress):
            return warm
        return warm * max(0.0, (1.0 - progress) / self.decay_share)

    def decaying(self, progress: float) -> bool:
        """Whether the decay has begun at ``progress``."""
        return self.decay_share > 0 and progress > 1.0 - self.decay_share


@dataclass(frozen=True, slots=True)
class Budget:
    """When a run ends: after ``max_steps`` steps, ``max_seconds`` of training or at ``until``.

    ``until`` is a Unix time. Progress is the largest of the three readings. Against the clock it is
    trained / (trained + left), where time during which the process stood still is not *trained* but
    does shorten what is *left*: a pause makes the rest of the schedule quicker, never later.
    """

    max_steps: int | None = None
    max_seconds: float | None = None
    until: float | None = None
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.max_steps is None and self.max_seconds is None and self.until is None:
            raise ConfigError("budget: got none, expected a number of steps, minutes or a time of day")

    def part(self, share: float) -> Budget:
        """The first ``share`` of this budget, as seen from now."""
        until = None if self.until is None else self.now() + share * max(0.0, self.until - self.now())
        return replace(
            self,
            max_steps=None if self.max_steps is None else max(1, round(share * self.max_steps)),
            max_seconds=None if self.max_seconds is None else share * self.max_seconds,
            until=until,
        )

    def after(self, share: float) -> Budget:
        """What is left once the first ``share`` is used; a time of day stays what it is."""
        return replace(
            self,
            max_steps=None if self.max_steps is None else max(1, self.max_steps - round(share * self.max_steps)),
            max_seconds=None if self.max_seconds is None else (1.0 - share) * self.max_seconds,
        )

    def progress(self, step: int, trained_seconds: float) -> float:
        """Share of the run that is over before step ``step``; 1 or more: stop."""
        shares = [0.0]
        if self.max_steps is not None:
            shares.append(step / self.max_steps if self.max_steps else 1.0)
        if self.max_seconds is not None:
            shares.append(trained_seconds / self.max_seconds if self.max_seconds else 1.0)
        if self.until is not None:
            left = self.until - self.now()
            shares.append(1.0 if left <= 0 else trained_seconds / (trained_seconds + left))
        return max(shares)

    def seconds_left(self, step: int, trained_seconds: float) -> float:
        """Seconds until the run ends, at the speed seen so far (infinite before the first step)."""
        lefts = [float("inf")]
        if self.max_steps is not None and step > 0:
            lefts.append((self.max_steps - step) * trained_seconds / step)
        if self.max_seconds is not None:
            lefts.append(self.max_seconds - trained_seconds)
        if self.until is not None:
            lefts.append(self.until - self.now())
        return max(0.0, min(lefts))


def parse_until(text: str, now: datetime | None = None) -> float:
    """``HH:MM`` (the next such time, local) or an ISO date and time, as Unix time.

    Raises:
        ConfigError: ``text`` is neither.
    """
    now = now or datetime.now()
    try:
        if len(text) == 5 and text[2] == ":":
            clock = datetime.strptime(text, "%H:%M")
            moment = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
            return (moment if moment > now else moment + timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ConfigError(f"until: got {text!r}, expected HH:MM or an ISO date and time") from error
