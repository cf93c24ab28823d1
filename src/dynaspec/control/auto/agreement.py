"""What ``auto`` holds on to between steps: lengths that were agreed on, and what was expected of planned steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import StopRule

from .drafter import Wish
from .guard import Mode, Prediction

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Pending:
    """A planned step, until its outcome comes."""

    prediction: Prediction
    mode: Mode
    plain: Prediction
    """Of plain decoding."""
    found: float
    """Share of the requests that look-ups draft for, beside the model or plain decoding."""
    trims: bool
    offers: tuple[tuple[tuple[int, int], ...] | None, ...]
    """As in the view that was planned; empty where no look-up drafts."""

    @property
    def by_look_ups_alone(self) -> bool:
        """Whether look-ups draft in plain decoding."""
        return self.found > 0.0 and self.mode in ("plain", "probe_plain") and not self.prediction.drafts


@dataclass(slots=True)
class Agreement:
    """Lengths and proposers for some steps of the same requests."""

    ids: tuple[str, ...]
    prefill: int
    lengths: Wish
    """As expected."""
    granted: Ints
    """[B] most tokens; where a rule ends drafts, more than is expected."""
    owner: tuple[int, ...] | None
    """[B] proposers; None: the first for all."""
    stop: StopRule | None
    hoped: float
    """Tokens/s if acceptance is as good as it may well be; 0 without drafts."""
    expected: float
    """The same at the best estimate."""
    best: float
    """The same if drafters were as good as they get; infinite while that is not asked."""
    plain_goodput: float
    """Tokens/s."""
    speculation: Prediction
    plain: Prediction
    trims: bool
    looks_up: bool
    """Look-ups are asked beside the model, or beside plain decoding."""
    steps: int
    """For which it still holds."""
