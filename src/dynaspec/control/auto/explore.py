"""Which arm to play: plain decoding, or drafting with one of the proposers.

An arm's goodput is the predicted one times what steps of it really gave over what was predicted. The best is played;
another is probed as soon as the loss budget covers what the probe is expected to cost. A probe is charged what it
really lost, so one that gains pays for the next. Nothing else decides about modes. No clock: time is counted in steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..estimate.settings import AutoSettings

_LONG = 1 << 20
"""Steps: more than any plan holds."""
PLAIN = 0
"""The arm of plain decoding; that of proposer p is 1 + p."""


class Prediction(NamedTuple):
    """What steps of an arm are expected to give and take, without the prompts that are read beside: those take what
    they take, whichever arm is played."""

    tokens: float
    seconds: float
    once_s: float = 0.0
    """On top of that in the first one: what the drafter has to read."""

    @property
    def goodput(self) -> float:
        """Tokens a second in the long run; 0 where nothing was predicted."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Probe:
    """A run of steps of an arm that is not the best one."""

    arm: int
    best: Prediction
    """Of the best arm as the probe began: what is learnt in it does not change what it is held against."""
    left: int
    """Steps that it goes on unless the budget is used up."""
    steps: int = 0
    lost: float = 0.0
    """Steps of the best arm."""
    ago: int = 0


class Choice(NamedTuple):
    """The arm of a step, and what its outcome is held against."""

    arm: int
    probe: bool
    best: Prediction


class Explorer:
    """Chooses among plain decoding and the proposers.

    Args:
        runs_model: of each proposer.
    """

    def __init__(self, runs_model: Sequence[bool], settings: AutoSettings) -> None:
        self._settings, self._runs_model = settings, (False, *runs_model)
        arms = len(self._runs_model)
        self._share = settings.loss_budget / max(1, arms - 1)
        self._first_budget = self._share * settings.memory
        self._records: dict[int, npt.NDArray[np.float64]] = {}
        self.meet(1)
        self.budget = [0.0] + [self._first_budget] * (arms - 1)
        """[arms] steps that probes of each may cost at present."""
        self.watched: Set[int] = frozenset()
        """Arms whose drafts are compared with what comes whether they are played or not: a probe tells nothing new."""
        self._missed = [0.0] * arms
        self.measured = [0] * arms
        """[arms] steps of each that were measured so far."""
        self._leader = self._mode = PLAIN
        self._before = PLAIN
        """What led before a lookup took over; it goes on where that finds nothing any more."""
        self._stays = 0
        """Coming steps in which no other arm takes over."""
        self._since_change, self._change_lost = settings.settling, 0.0
        self.change_steps = settings.change_steps
        """Steps that changing the mode costs."""
        self._probe: Probe | None = None
        self.last_probe: Probe | None = None
        self._pause = 0
        self.quiet = 0
        """Coming steps in which no probe begins or ends, and no other arm takes over."""

    def meet(self, requests: int) -> None:
        """So many requests decode in the steps to come. By powers of two of that, measured tokens a request and those
        predicted of steps as long are kept [arms, 2]; older ones count less, and a new load starts from its neighbour.
        """
        bucket, prior = max(1, requests).bit_length(), self._settings.prior_steps
        if bucket not in self._records:
            near = min(self._records, key=lambda known: abs(known - bucket), default=None)
            record = np.ones((len(self._runs_model), 2)) if near is None else self._records[near]
            self._records[bucket] = record * (prior / record[:, 1:])
        self._record = self._records[bucket]

    def ratio(self, arm: int) -> float:
        """Measured over predicted goodput of an arm, at the present number of requests."""
        tokens, predicted = self._record[arm].tolist()
        return float(tokens / predicted)

    def choose(self, plans: Mapping[int, Prediction], steps: int, probe: Callable[[int], Prediction]) -> Choice:
        """The arm of the next step.

        Args:
            plans: of each arm that can be played.
            steps: since the last choice.
            probe: what the steps of a probe of an arm give and take.
        """
        goodput = {arm: plan.goodput * self.ratio(arm) for arm, plan in plans.items()}
        leader = self._leader = self._lead(goodput, plans, steps)
        best = Prediction(plans[leader].tokens, plans[leader].seconds / self.ratio(leader))
        others = {arm: plan for arm, plan in plans.items() if arm != leader and arm not in self.watched}
        costs = {arm: self._cost(arm, plan._replace(once_s=0.0), best) for arm, plan in others.items()}
        if self._probe is None and self._pause <= steps:  # a probe may lose more than the drafts that lose least
            for arm in [arm for arm in costs if arm != PLAIN and self.budget[arm] + steps * self._share >= costs[arm]]:
                costs[arm] = self._cost(arm, probe(arm), best)
        for arm, budget in enumerate(self.budget):
            saved = max(budget, self._first_budget, costs.get(arm, 0.0))
            self.budget[arm] = min(budget + steps * self._share * (arm != leader), saved)
        self._pause -= steps
        if self.last_probe is not None:
            self.last_probe.ago += steps
        if self._probe is not None:
            self._probe.left -= steps
            self._probe.steps += steps
            if not self._goes_on(self._probe, plans):
                # The best arm is measured anew before another one is held against it; most steps are its own.
                self._pause = self._settings.probe * self._probe.steps
                self.last_probe, self._probe = self._probe, None
        if self._probe is None and self._pause <= 0:
            due = [arm for arm, cost in costs.items() if self.budget[arm] >= cost]
            if due:
                arm = max(due, key=goodput.__getitem__)
                self._probe = Probe(arm, best, left=self._length(arm))
        if self._probe is not None:
            self.quiet = self._probe.left - 1
            return Choice(self._probe.arm, True, self._probe.best)
        waits = [math.ceil((cost - self.budget[arm]) / self._share) for arm, cost in costs.items()]
        self.quiet = min(max(self._pause, min(waits, default=_LONG)) - 1, self._stays)
        return Choice(leader, False, best)

    def ran(self, arm: int) -> bool:
        """A step of this arm has come; returns whether steps of its kind have settled."""
        mode = arm if self._runs_model[arm] else PLAIN
        if mode != self._mode:
            self._mode, self._since_change, self._change_lost = mode, 0, 0.0
        self._since_change += 1
        return self._since_change > self._settings.settling

    def observe(
        self, choice: Choice, arm: int, requests: int, expected: Prediction, tokens: float, seconds: float
    ) -> None:
        """A step was measured, see ``ran``.

        Args:
            choice: as it was made.
            arm: that really ran, for so many ``requests``.
            expected: of it.
        """
        self.measured[arm] += 1
        # However long a step takes that was disturbed, it counts for no more than all that may be saved up.
        on, took = self._settings, min(seconds / expected.seconds, 1.0 + self._first_budget)
        extra = took - 1.0 - expected.once_s / expected.seconds
        if self._since_change > on.settling and arm == choice.arm:
            self._record += (on.prior_steps - self._record) / on.memory  # what is not measured is as predicted again
            self._record[arm] += tokens / requests, took * expected.tokens / requests
        elif arm == choice.arm:
            self._change_lost += extra
            if self._since_change == on.settling:
                self.change_steps += (max(0.0, self._change_lost) - self.change_steps) / on.probe
        if choice.probe:
            lost = took * expected.seconds / choice.best.seconds - tokens / choice.best.tokens
            self._charge(choice.arm, min(lost, self._first_budget))
        elif self._since_change <= on.settling and self._pause > 0 and self.last_probe is not None:
            self._charge(self.last_probe.arm, extra)  # what a probe leaves behind in the caches is its price too

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        probe, found = self.last_probe, None
        if probe is not None:
            mode = "plain" if probe.arm == PLAIN else "draft"
            found = {"mode": mode, "steps": probe.steps, "cost_steps": probe.lost, "steps_ago": probe.ago}
        budget = max(self.budget[1:], default=0.0)
        return {"change_steps": self.change_steps, "probe_budget_steps": max(0.0, budget), "last_probe": found}

    def _lead(self, goodput: Mapping[int, float], plans: Mapping[int, Prediction], steps: int) -> int:
        """The best arm, as soon as it would have gained as much as changing to it costs."""
        leader = self._leader if self._leader in goodput else self._before
        for arm in goodput:
            self._missed[arm] = max(0.0, self._missed[arm] + steps * (goodput[arm] / goodput[leader] - 1.0))
        waits = self._waits(leader, goodput, plans)
        ready = [arm for arm, left in waits.items() if left <= 0.0]
        if ready:
            if leader == PLAIN or self._runs_model[leader]:
                self._before = leader
            self._missed = [0.0] * len(self._missed)
            leader = max(ready, key=goodput.__getitem__)
            waits = self._waits(leader, goodput, plans)
        self._stays = math.ceil(min(waits.values(), default=_LONG)) - 1
        return leader

    def _waits(self, leader: int, goodput: Mapping[int, float], plans: Mapping[int, Prediction]) -> dict[int, float]:
        """By better arm, the steps until it takes over."""
        waits = {}
        for arm in goodput:
            gain = goodput[arm] / goodput[leader] - 1.0
            if gain > 0.0:
                cost = self._change(arm, self._mode) + plans[arm].once_s / plans[leader].seconds
                waits[arm] = (cost - self._missed[arm]) / gain
        return waits

    def _goes_on(self, probe: Probe, plans: Mapping[int, Prediction]) -> bool:
        if probe.arm == self._leader or probe.arm not in plans or self.budget[probe.arm] < 0.0:
            return False
        longest = self._settings.settling + 2 * self._settings.probe
        return probe.left > 0 or (probe.lost <= 0.0 and probe.steps < longest)

    def _length(self, arm: int) -> int:
        """Steps of a probe: drafts show at once whether they are accepted, plain steps their speed when settled."""
        settles = arm == PLAIN and self._runs_model[self._leader]
        return self._settings.probe + (self._settings.settling if settles else 0)

    def _cost(self, arm: int, plan: Prediction, best: Prediction) -> float:
        """Steps of the best arm that a probe is expected to lose."""
        loss = max(0.0, plan.seconds / best.seconds - plan.tokens * self.ratio(arm) / best.tokens)
        return self._length(arm) * loss + plan.once_s / best.seconds + self._change(arm, self._leader)

    def _change(self, arm: int, other: int) -> float:
        """Steps that changing from one to the other costs; caches hold what a model needs, and nothing for lookups."""
        return self.change_steps if arm != other and (self._runs_model[arm] or self._runs_model[other]) else 0.0

    def _charge(self, arm: int, lost: float) -> None:
        self.budget[arm] = min(self.budget[arm] - lost, 2.0 * self._first_budget)
        probe = self._probe or self.last_probe
        if probe is not None:
            probe.lost += lost
