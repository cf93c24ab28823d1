"""What ``auto`` holds on to between steps: lengths that were agreed on, and what was expected of planned steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import SpecPlan, StepView, StopRule

from .drafter import Wish
from .guard import Mode
from .prediction import Prediction

Ints = npt.NDArray[np.int64]

_ALIKE = 0.1
"""Requests more or fewer, as a share, that make no other load."""
ALIKE_STEPS: dict[Mode, int] = {"plain": 3, "speculate": 2}
"""Steps, of each mode that is not a trial, that tell the same."""


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
    lag: tuple[tuple[int, ...], ...] = ()
    """The same of a trial; empty in other steps."""

    @property
    def alike(self) -> int:
        """Steps that tell the same, so that one of them may stand for all."""
        return ALIKE_STEPS.get(self.mode, 1) if not self.found else 1

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
    trial: float
    """Steps of plain decoding that a trial of drafting would cost; 0 while that is not asked."""
    speculation: Prediction
    plain: Prediction
    trims: bool
    looks_up: bool
    """Look-ups are asked beside the model, or beside plain decoding."""
    steps: int
    """For which it still holds."""
    learnt: int
    """Steps that had been learnt from when it was expected what plain decoding takes."""
    pending: dict[Mode, Pending] = field(default_factory=dict)
    """What is noted of its steps, by their mode, where look-ups draft for none."""
    drafts: SpecPlan | None = None
    """A step that drafts, if nothing has shortened its drafts."""

    def concerns(self, view: StepView) -> bool:
        """Whether it was made for these requests."""
        return self.ids == view.ids and self.prefill == view.prefill_tokens

    def resembles(self, view: StepView) -> bool:
        """Whether there are about as many requests, which is enough to go on decoding plainly."""
        return abs(len(view.ids) - len(self.ids)) <= _ALIKE * len(self.ids)

    def renew(self, plain: Prediction, learnt: int) -> None:
        """What plain decoding takes is expected anew: steps held against what was expected before costs were learnt
        would make it look slow for good, and drafting fast."""
        self.plain, self.learnt = plain, learnt
        self.pending.clear()

    def again(self, view: StepView, *, any_length: bool) -> SpecPlan | None:
        """The plan of its steps that draft; None where it has to be made.

        Args:
            any_length: the host can cut each draft to the room that its request has left.
        """
        made = self.drafts
        if made is None:
            return None
        if max(made.depth) <= min(*view.room_depth, *view.room_nodes):
            return made.at(view.step)
        depth = tuple(map(min, made.depth, view.room_depth, view.room_nodes)) if any_length else ()
        return made.at(view.step, depth) if any(depth) else None
