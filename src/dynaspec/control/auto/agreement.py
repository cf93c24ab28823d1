"""What ``auto`` holds on to between steps: lengths that were agreed on, and what was expected of planned steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import SpecPlan, StepView, StopRule

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

    def extended(
        self,
        view: StepView,
        value: float,
        reading_s: Callable[[int], float],
        pass_s: Callable[[float, float, float], float],
    ) -> Agreement | None:
        """The same for requests of which some are others; None where it has to be settled anew.

        Who is new gets what the others have (a rule ends drafts, by what they turn out to be), unless reading what the
        drafter lacks of it takes more than its drafts bring.

        Args:
            value: seconds that a token is worth.
            reading_s: seconds that reading takes for a request of the view, as a share of each step.
            pass_s: see ``StepCosts.pass_s``.
        """
        count, before, lengths = len(view.ids), len(self.ids), self.lengths
        if self.owner is not None or not _FEWER * self.settled_for <= count <= _MORE * self.settled_for:
            return None
        place_of = {request: place for place, request in enumerate(self.ids)}
        place = [place_of.get(request, -1) for request in view.ids]
        depth, worth, granted = lengths.depth[place], lengths.worth[place], self.granted[place]
        new = [index for index, old in enumerate(place) if old < 0]
        depth[new] = 0
        if not depth.any():
            return None
        context, seen, plain_s = float(sum(view.context_len)), lengths.context, self.plain.seconds
        drafting_s = self.speculation.seconds
        rows_s = pass_s(before + lengths.rows, context + seen, context) - pass_s(before, context, context)
        # Passes are there anyway.
        gain = (lengths.hoped * value - rows_s) / np.count_nonzero(lengths.depth)
        usual = int(lengths.depth.argmax())
        for index in new:
            pays = reading_s(index) < gain
            depth[index], granted[index] = pays * lengths.depth[usual], pays * self.granted[usual]
            worth[index] = pays * lengths.worth[usual]
        stop = self.stop
        if stop is not None and stop.offset:
            stop = replace(stop, offset=tuple([0.0 if old < 0 else stop.offset[old] for old in place]))
        share = count / before
        rows, seen = share * lengths.rows, share * seen
        hoped, expected = share * lengths.hoped, share * lengths.expected
        if count != before:  # what they see has hardly changed
            before_s = pass_s(before, context, context)
            drafting_s += pass_s(count + rows, context + seen, context) - before_s - rows_s
            plain_s += pass_s(count, context, context) - before_s
        plain = Prediction(False, float(count), plain_s)
        faster = plain.goodput / self.plain.goodput
        return Agreement(
            ids=view.ids,
            prefill=view.prefill_tokens,
            lengths=Wish(depth, worth, hoped, expected, lengths.seconds, rows, seen),
            granted=granted,
            owner=None,
            stop=stop,
            hoped=self.hoped * faster,
            expected=self.expected * faster,
            best=self.best,
            trial=self.trial,
            speculation=Prediction(True, share * self.speculation.emitted, drafting_s),
            plain=plain,
            trims=self.trims,
            looks_up=self.looks_up,
            steps=self.steps,
            learnt=self.learnt,
            settled_for=self.settled_for,
        )

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
