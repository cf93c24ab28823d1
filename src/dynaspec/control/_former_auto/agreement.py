"""What ``auto`` holds on to between steps: lengths that were agreed on, and what was expected of planned steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import Needs, SpecPlan, StepView, StopRule

from .drafter import Wish
from .guard import Mode
from .prediction import Prediction

Ints = npt.NDArray[np.int64]

_ALIKE = 0.1
"""Requests more or fewer, as a share, that make no other load."""
_FEWER, _MORE = 0.5, 1.25
"""Requests, over those it was settled for, among whom lengths may be what they were for some steps: those who follow
others come a step or two later."""
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
    settled_for: int
    """Requests there were when it was settled."""
    usual: tuple[int, float, int]
    """Length, worth and most tokens of whoever drafts most."""
    gain: float
    """Seconds that drafts bring a request on average, passes apart, which are there anyway."""
    pending: dict[Mode, Pending] = field(default_factory=dict)
    """What is noted of its steps, by their mode, where look-ups draft for none."""
    drafts: SpecPlan | None = None
    """A step that drafts, as far as requests have room; None where it has to be planned each time."""

    def concerns(self, view: StepView) -> bool:
        """Whether it was made for these requests."""
        return self.ids == view.ids and self.prefill == view.prefill_tokens

    def resembles(self, view: StepView) -> bool:
        """Whether there are about as many requests, which is enough to go on decoding plainly."""
        return abs(len(view.ids) - len(self.ids)) <= _ALIKE * len(self.ids)

    def extend(
        self,
        view: StepView,
        reading_s: Callable[[int], float],
        pass_s: Callable[[float, float, float], float],
    ) -> bool:
        """Makes it one for requests of which some are others; False where it has to be settled anew.

        Who is new gets what the others have (a rule ends drafts, by what they turn out to be), unless reading what the
        drafter lacks of it takes more than its drafts bring.

        Args:
            reading_s: seconds that reading takes for a request of the view, as a share of each step.
            pass_s: see ``StepCosts.pass_s``.
        """
        count, lengths = len(view.ids), self.lengths
        if self.owner is not None or not _FEWER * self.settled_for <= count <= _MORE * self.settled_for:
            return False
        place_of = {request: place for place, request in enumerate(self.ids)}
        place = [place_of.get(request, -1) for request in view.ids]
        new = [index for index, old in enumerate(place) if old < 0]
        depth, worth, granted = lengths.depth[place], lengths.worth[place], self.granted[place]
        depth[new] = 0
        if not np.count_nonzero(depth):
            return False
        usual_depth, usual_worth, usual_granted = self.usual
        for index in new:
            pays = reading_s(index) < self.gain
            depth[index], worth[index], granted[index] = pays * usual_depth, pays * usual_worth, pays * usual_granted
        lengths.depth, lengths.worth, self.granted = depth, worth, granted
        if self.stop is not None and self.stop.offset:
            offset = self.stop.offset
            self.stop = self.stop.with_offset(tuple([0.0 if old < 0 else offset[old] for old in place]))
        if count != len(self.ids):
            self._scale(count, float(sum(view.context_len)), pass_s)
        self.ids, self.prefill, self.drafts = view.ids, view.prefill_tokens, None
        return True

    def _scale(self, count: int, context: float, pass_s: Callable[[float, float, float], float]) -> None:
        """What is expected of so many requests, of whom each drafts as before."""
        before, lengths = len(self.ids), self.lengths
        share = count / before
        before_s, with_drafts_s = (
            pass_s(requests + rows, context + seen, context)
            for requests, rows, seen in ((before, 0.0, 0.0), (before, lengths.rows, lengths.context))
        )
        lengths.rows, lengths.context = share * lengths.rows, share * lengths.context
        lengths.hoped, lengths.expected = share * lengths.hoped, share * lengths.expected
        drafting_s = self.speculation.seconds - with_drafts_s
        drafting_s += pass_s(count + lengths.rows, context + lengths.context, context)
        plain = Prediction(False, float(count), self.plain.seconds - before_s + pass_s(count, context, context))
        faster = plain.goodput / self.plain.goodput
        self.hoped, self.expected = self.hoped * faster, self.expected * faster
        self.speculation, self.plain = Prediction(True, share * self.speculation.emitted, drafting_s), plain
        self.pending.clear()

    def renew(self, plain: Prediction, learnt: int) -> None:
        """What plain decoding takes is expected anew: steps held against what was expected before costs were learnt
        would make it look slow for good, and drafting fast."""
        self.plain, self.learnt = plain, learnt
        self.pending.clear()

    def again(self, view: StepView, next_needs: Needs, *, any_length: bool) -> SpecPlan | None:
        """The plan of its steps that draft; None where it has to be made.

        Args:
            next_needs: see ``SpecPlan``.
            any_length: the host can cut each draft to the room that its request has left.
        """
        made = self.drafts
        if made is None:
            return None
        if made.next_needs != next_needs:
            made = self.drafts = replace(made, next_needs=next_needs)
        if max(made.depth) <= min(*view.room_depth, *view.room_nodes):
            return made.at(view.step)
        depth = tuple(map(min, made.depth, view.room_depth, view.room_nodes)) if any_length else ()
        return made.at(view.step, depth) if any(depth) else None
