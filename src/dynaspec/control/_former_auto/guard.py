"""Plain decoding or speculation: predictions, held against what steps really gave and took."""

from __future__ import annotations

import math
from typing import Literal

from .loads import Loads
from .prediction import Prediction, Ratio

Mode = Literal["plain", "speculate", "probe_plain", "probe_draft"]

_SHORTEST, _LONGEST = 8, 64
"""Steps between two trials of drafting while decoding plainly; doubled after each, but for those that paid. What trials
may cost keeps those of dear drafters further apart."""
_PLAIN_EVERY = ((1.05, 96), (1.2, 192), (1.5, 512), (float("inf"), 1024))
"""How often plain decoding is tried at first: (predicted advantage of speculation below, steps)."""
_OUTLASTED_MOST, _PLAIN_RAREST = 8, 1024
"""Each trial that drafting outlasts doubles them, up to so many times, and up to so many steps."""
_PLAIN_RUN = 8
"""Steps of such a trial: the first four tell nothing, as the machine is set up for drafting; on a CPU they get 20 %
faster from the first to the sixth."""
_TRIAL_WEIGHT = 6.0
"""A step of a trial of plain decoding counts as so many: there are few of them."""
_TRIAL_SHARE, _LOOK_UP_SHARE = 0.007, 0.003
"""Shares of all steps that trials of drafting may cost, and look-ups."""
_UNPROVEN_AFTER, _UNPROVEN_SHARE = 2, 0.5
"""Trials of a drafter of which nothing has ever been accepted, after which they may cost this part of the share."""
_LOOK_UPS_FROM = 0.1
"""Steps saved for look-ups before they are asked again: those to whom nothing is left are asked in bursts."""
_CREDIT, _SAVED = 0.5, 2.0
"""Steps that trials may cost at first, and that are saved up for them at most, or for look-ups. Who would take more,
as there is much to be read first, is tried with these."""
_AFTERMATH = 0.4
"""Steps that a trial costs beside its own: those of plain decoding that follow it find cold caches; on a CPU the first
takes 16 % longer, the second 9, the third 4."""
_FIRST_COST = 0.5
"""Steps that the very first trial counts as at most: it runs code that has hardly run before, which takes a step and
more by itself and does not come again. Else one that misses would keep a short request in plain decoding to its end."""
_PATIENCE, _PATIENCE_SHARE = 0.5, 0.001
"""Steps that drafting may lose, by what is expected, before it is left: texts become easier again, and beliefs err.
Most that are saved up, by what it gains in other steps, as it has to lose on the whole, and by this share of all."""
_ON_END = 6
"""Trials that follow each other as long as they go well, whatever they cost."""
_LONGEST_DEBT = 256
"""Steps after which what trials have cost is forgotten: it may be their outcome that was odd."""
_ROUNDING = 1e-9
"""Steps: what is saved in one sum or in many is the same."""
_STAKE = 0.03
"""Trials may cost no more than this share of what the best drafter would gain, …"""
_LEAST_SHARE = 0.002
"""… but this of all steps at least, as what drafting costs is not well known where nothing is drafted."""
_LEFT_BELOW, _HYSTERESIS = 0.99, 1.0
"""Speculation is left when it promises less than the first, as to decode plainly and try it now and then costs too;
taken up again from the second on."""
_FRESH = 16
"""Steps under another load in which a promise is enough, as it was the load that had ended speculation."""
_WORTH_SEEING = 0.85
"""Where it has not been seen what drafting takes at this load, it goes on for some steps if it promises so much."""
_HOPELESS = 0.95
"""Where speculation promises less than this, nothing but a trial is going to change that."""
_LOOK_AGAIN = 32
"""Steps between two looks at what it promises where it promises more, and waits for a trial all the same."""


class PlainGuard:
    """Decides the mode of each step. Counts steps, no clock."""

    def __init__(self, *, only_by_trial: bool = False, tries_first: bool = False) -> None:
        """
        Args:
            only_by_trial: from plain decoding, nothing but a trial leads back to drafting: for proposers of which
                nothing is known before they have drafted.
            tries_first: begins with plain decoding and a trial, as a proposer can be tried at little cost; otherwise
                with drafting.
        """
        self._only_by_trial = only_by_trial
        self._paid = False
        """The latest trial since speculation was left."""
        self._encouraged = False
        """It went well, though it may have cost: what the drafter lacked of a request had to be read first."""
        self._missed: int | None = 0 if tries_first else None
        """Trials so far, none of which hit; None: one did, or it began with drafting."""
        self._on_end = 0
        """Trials without a step of plain decoding between them."""
        self._just_tried = False
        self._allowance = _SAVED if tries_first else _CREDIT
        """Steps that trials may cost now; negative: the latest cost more than was saved."""
        self._for_look_ups = 0.0
        """The same for look-ups."""
        self._looks_up = True
        self._speculation: dict[int, Ratio] = {}
        """By kind of load: how much better drafts do than planned, as a rule ends them, differs between loads."""
        self.speculation = Ratio()
        """At the present load."""
        self.plain = Ratio()
        self.mode: Mode = "plain" if tries_first else "speculate"
        self.speculating = not tries_first
        self._patience = _PATIENCE
        self._since_plain = 0
        self._outlasted = 1
        """How many times less often plain decoding is tried than at first."""
        self._plain_left = 0
        """Steps that a trial of plain decoding goes on."""
        self._until_trial = 0 if tries_first else _SHORTEST
        self._pause = 1 if tries_first else _SHORTEST
        self._unseen = 0
        """Steps on end in which it would not be seen what a trial costs."""
        self._news = _FRESH + tries_first
        """Steps of plain decoding since the load changed."""
        self._loads = Loads()
        self.calm = 0
        """Coming steps whose mode is that of the last one, as long as no more is known."""
        self._held = 0
        """Steps since the last decision."""

    def hold(self) -> Mode:
        """The next step goes on in the same mode, which only ``calm`` steps may do without a decision."""
        self.calm -= 1
        self._held += 1
        return self.mode

    def decide(
        self, hoped: float, expected: float, plain: float, load: int, best: float = math.inf, trial: float = 0.0
    ) -> Mode:
        """The mode of the next step.

        Args:
            hoped: tokens/s of the best plan with drafts if acceptance is as good as it may well be; 0 if there is none.
            expected: the same at the best estimate.
            plain: predicted tokens/s of plain decoding.
            load: requests.
            best: as ``hoped``, if drafters were as good as they get.
            trial: what a trial of drafting that brings nothing would cost, in steps of plain decoding; infinite where
                what it costs would not be seen: then there is one only if that has been so for long.
        """
        steps, self._held = 1 + self._held, 0
        if self._loads.meet(load, steps):
            # What trials cost there must not keep them off here.
            self._allowance, self._news, self._pause = _SAVED, 0, _SHORTEST
            self._outlasted = 1
            self._until_trial = min(self._until_trial, _SHORTEST)
        self.speculation = self._speculation_at(self._loads.kind)
        share = min(_TRIAL_SHARE, max(_LEAST_SHARE, _STAKE * (best / plain - 1.0)))
        if self._missed is not None and self._missed >= _UNPROVEN_AFTER:
            share *= _UNPROVEN_SHARE
        self._allowance = min(max(self._allowance, -_LONGEST_DEBT * share) + steps * share, _SAVED)
        self._for_look_ups = min(self._for_look_ups + steps * _LOOK_UP_SHARE, _SAVED)
        corrected = self.favour / plain
        advantage, known = hoped * corrected, expected * corrected
        saved = _PATIENCE_SHARE + (known - _LEFT_BELOW if self.speculating else 0.0)
        self._patience = max(0.0, min(self._patience + steps * saved, _PATIENCE))
        if self._goes_on(advantage, known):
            self._speculate(advantage, steps)
        else:
            self._decode_plainly(advantage, steps, share, trial)
        self._just_tried = False
        patient_for = math.ceil(self._patience / -saved) if saved < 0.0 else math.inf
        self.calm = int(max(0, min(self.calm, self._loads.unsure_for - 1, patient_for - 1)))
        return self.mode

    def _speculate(self, advantage: float, steps: int) -> None:
        if not self.speculating:
            self.speculating, self._pause, self._outlasted = True, _SHORTEST, 1
            if self.plain.value < 1.0:  # the machine's slowness, see ``favour``
                self.plain = Ratio()
        every = min(self._outlasted * _plain_every(advantage), _PLAIN_RAREST)
        self._since_plain += steps
        if self._since_plain >= every:
            self._since_plain, self._plain_left = 0, _PLAIN_RUN
            self._outlasted = min(2 * self._outlasted, _OUTLASTED_MOST)
        self.mode = "probe_plain" if self._plain_left else "speculate"
        self._loads.drafted(0 if self._plain_left else steps)
        self.calm = 0 if self._plain_left else max(0, every - self._since_plain - 1)
        self._plain_left = max(0, self._plain_left - 1)

    def _decode_plainly(self, advantage: float, steps: int, share: float, trial: float) -> None:
        if self.speculating:
            self.speculating, self._until_trial, self._plain_left = False, self._pause, 0
            self._paid = self._encouraged = False
            self._news, steps = _FRESH, 1
        self._until_trial -= steps
        self._news += steps
        self._unseen = self._unseen + steps if trial == math.inf else 0
        unseen = 0 < self._unseen < _LONGEST
        promising = self._until_trial <= 0 or advantage > _HYSTERESIS
        goes_on = self._paid or self._encouraged
        missing = min(trial + _AFTERMATH, _SAVED) - self._allowance - _ROUNDING
        due = promising and not unseen and (goes_on or missing < 0.0)
        self.mode = "probe_draft" if due else "plain"
        self.calm = 0
        if due:
            self._until_trial = self._pause = min(2 * self._pause, _LONGEST)
            return
        self._on_end = 0
        if advantage < _HOPELESS or not self._promise_is_enough:
            pause = 0 if advantage > _HYSTERESIS else self._until_trial
            saving = 0 if goes_on or unseen else math.ceil(missing / share)
            coming = max(pause, saving, 1)
            self.calm = (coming if advantage < _HOPELESS else min(coming, _LOOK_AGAIN)) - 1

    def _goes_on(self, advantage: float, known: float) -> bool:
        """Whether this step should speculate, as the last did, or after plain decoding.

        Args:
            advantage: what there is to be hoped for.
            known: what is expected: that is what drafting must give, once it has been seen. What a trial in the step
                before has taught may be enough to take it up although the trial cost more than it gave: it drafts for
                few requests, from cold caches.
        """
        if self._loads.strange and (self.speculating or self._fresh):
            return advantage > _WORTH_SEEING
        if self.speculating:
            return known > _LEFT_BELOW or self._patience > 0.0
        return (self._just_tried and known > _HYSTERESIS) or (advantage > _HYSTERESIS and self._promise_is_enough)

    def _speculation_at(self, kind: int) -> Ratio:
        """What is known of drafting at such loads, or expected by what is known of the most similar one."""
        known = self._speculation
        if kind not in known:
            similar = min(known, key=lambda other: abs(other - kind), default=None)
            known[kind] = self.speculation if similar is None else Ratio(known[similar].value)
        return known[kind]

    @property
    def _fresh(self) -> bool:
        return self._news <= _FRESH

    @property
    def _promise_is_enough(self) -> bool:
        """Whether drafting is taken up again without another trial."""
        return self._paid or self._fresh or not self._only_by_trial

    @property
    def favour(self) -> float:
        """Tokens a second that speculation gave over what was predicted, beside the same of plain decoding.

        Steps on end that are slower than predicted mostly mean that the machine has become slower, which drafting would
        feel as well. So what plain decoding takes more counts only where drafting goes on and it is tried now and then.
        """
        plain = self.plain.value if self.speculating else max(1.0, self.plain.value)
        return self.speculation.value / plain

    @property
    def affords_look_ups(self) -> bool:
        """Whether look-ups have not cost more than may be lost."""
        return not self.until_look_ups

    @property
    def until_look_ups(self) -> int:
        """Steps until they are afforded."""
        least = 0.0 if self._looks_up else _LOOK_UPS_FROM
        missing = least - self._for_look_ups - self._held * _LOOK_UP_SHARE - _ROUNDING
        return max(0, math.ceil(missing / _LOOK_UP_SHARE))

    def looked_up(self, steps_lost: float) -> None:
        """What look-ups cost, asking them too, in steps; what they gain beside plain decoding pays for later ones."""
        self._for_look_ups = min(self._for_look_ups - steps_lost, _SAVED)
        self._looks_up = self._for_look_ups >= 0.0

    def expects_of_look_ups(self, steps_gained: float) -> None:
        """What look-ups beside drafts should bring pays for asking them, and for no more: it is not seen."""
        most = max(self._for_look_ups, _LOOK_UPS_FROM)
        self._for_look_ups = min(self._for_look_ups + steps_gained, most)

    def tried(self, steps_lost: float, *, good: bool, hit: bool) -> None:
        """What a trial of drafting cost, in steps of plain decoding. One that cost nothing or went well goes on.

        Args:
            steps_lost: what it took, less what it gave; not above 0 if it gave more tokens a second.
            good: all that it drafted was accepted.
            hit: some of it was. If not, what is still believed of drafting takes it up no sooner than a better trial.
        """
        if self._missed == 0:
            steps_lost = min(steps_lost, _FIRST_COST)
        self._paid, self._just_tried = steps_lost <= 0.0, hit
        if self._missed is not None:
            self._missed = None if hit else self._missed + 1
        self._on_end += 1
        self._encouraged = good and self._on_end < _ON_END
        self._allowance -= 0.0 if self._paid else steps_lost + (0.0 if self._encouraged else _AFTERMATH)
        if (self._paid or self._encouraged) and not self.speculating:
            self._until_trial, self._pause = 0, max(_SHORTEST, self._pause // 2)

    def observe(
        self, prediction: Prediction, emitted: int, seconds: float, *, trial: bool = False, weight: float = 1.0
    ) -> None:
        """A step without prefill has ended.

        Args:
            trial: it was one of plain decoding.
            weight: steps that it stands for; less than one where it tells of some requests only.
        """
        if not weight:
            return
        used, other = (self.speculation, self.plain) if prediction.drafts else (self.plain, self.speculation)
        own = weight * (_TRIAL_WEIGHT if trial else 1.0)
        used.observe(float(emitted), seconds, prediction.emitted, prediction.seconds, own)
        if not trial:
            other.rest(weight)


def _plain_every(advantage: float) -> int:
    """Steps of speculation to a trial of plain decoding."""
    for below, steps in _PLAIN_EVERY:
        if advantage < below:
            return steps
    return _PLAIN_EVERY[-1][1]
