"""Which arm to play: plain decoding, or drafting with one of the proposers.

An arm's worth is its predicted goodput times what steps of it really gave over what was predicted. The best is played;
another is probed as soon as the loss budget covers what the probe is expected to cost. A probe is charged what it
really lost, so one that gains pays for the next. Nothing else decides about modes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .settings import AutoSettings

PLAIN = 0
"""The arm of plain decoding; that of proposer p is 1 + p."""
_USUAL_CHANGE, _LEARNT = 0.5, 0.25
"""Steps that changing the mode costs, until it has been seen; weight of the latest change in that."""
_SLOWEST = 3.0
"""A step that takes longer than so many times what was expected was disturbed: it counts as that much longer only."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step is expected to give and take."""

    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second; 0 where nothing was predicted."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Record:
    """Of one arm: tokens a request that steps gave, and that were predicted of steps as long; older ones count less."""

    tokens: float
    predicted: float


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


@dataclass(frozen=True, slots=True)
class Choice:
    """The arm of a step, and what its outcome is held against."""

    arm: int
    probe: bool
    best: Prediction


class Explorer:
    """Counts steps, no clock.

    Args:
        runs_model: of each proposer.
    """

    def __init__(self, runs_model: Sequence[bool], settings: AutoSettings) -> None:
        self._settings, self._runs_model = settings, (False, *runs_model)
        arms = len(self._runs_model)
        self._share = settings.loss_budget / max(1, arms - 1)
        self._records: dict[tuple[int, int], _Record] = {}
        self._bucket = 0
        self.budget = [0.0] + [settings.first_budget] * (arms - 1)
        self._trusted = [not model for model in self._runs_model]
        self._missed = [0.0] * arms
        self._leader = self._mode = PLAIN
        self._since_change, self._change_lost, self.change_steps = settings.settling, 0.0, _USUAL_CHANGE
        self._probe: Probe | None = None
        self.last_probe: Probe | None = None
        self._pause = 0
        self.quiet = 0
        """Coming steps in which no probe can be due."""

    def meet(self, requests: int) -> None:
        """So many requests decode in the steps to come. Records are kept by powers of two of that."""
        self._bucket = max(1, requests).bit_length()

    def ratio(self, arm: int) -> float:
        """Measured over predicted goodput of an arm, at the present number of requests."""
        record = self._record(arm)
        return record.tokens / record.predicted

    def choose(
        self,
        plans: Mapping[int, Prediction],
        probes: Mapping[int, Prediction],
        reading_s: Mapping[int, float],
        steps: int,
    ) -> Choice:
        """The arm of the next step.

        Args:
            plans: of each arm that can be played, as in the long run.
            probes: of those that can be probed.
            reading_s: seconds that a probe takes once, to read what the drafter lacks.
            steps: since the last choice.
        """
        leader = self._leader = self._lead({arm: plan.goodput * self.ratio(arm) for arm, plan in plans.items()}, steps)
        best = Prediction(plans[leader].tokens, plans[leader].seconds / self.ratio(leader))
        costs = {arm: self._cost(arm, probes[arm], reading_s.get(arm, 0.0), best) for arm in probes if arm != leader}
        for arm, cost in costs.items():
            saved = max(self.budget[arm], self._settings.first_budget, cost)
            self.budget[arm] = min(self.budget[arm] + steps * self._share, saved)
        self._pause -= steps
        if self.last_probe is not None:
            self.last_probe.ago += steps
        if self._probe is not None and not self._goes_on(self._probe, probes):
            # The best arm is measured anew before another one is held against it.
            self._pause = self._probe.steps + self._settings.settling
            self.last_probe, self._probe = self._probe, None
        if self._probe is None and self._pause <= 0:
            due = [arm for arm, cost in costs.items() if self.budget[arm] >= cost]
            if due:
                arm = max(due, key=lambda arm: probes[arm].goodput * self.ratio(arm))
                self._probe = Probe(arm, best, left=self._length(arm))
        if self._probe is not None:
            self._probe.left -= 1
            self._probe.steps += 1
            self.quiet = 0
            return Choice(self._probe.arm, True, self._probe.best)
        waits = [math.ceil((cost - self.budget[arm]) / self._share) for arm, cost in costs.items()]
        self.quiet = max(self._pause, min(waits, default=1 << 20)) - 1
        return Choice(leader, False, best)

    def may_probe(self, proposers: Iterable[int]) -> bool:
        """Whether one of these may be probed in the next step."""
        return self._probe is not None or (self._pause <= 1 and any(1 + p != self._leader for p in proposers))

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
        """A step was measured, without prefill, see ``ran``.

        Args:
            choice: as it was made.
            arm: that really ran, for so many ``requests``.
            expected: of it.
        """
        settings, took = self._settings, min(seconds / expected.seconds, _SLOWEST)
        if self._since_change > settings.settling and arm == choice.arm:
            for other in range(len(self._runs_model)):  # what is not measured goes back to what is predicted
                record = self._record(other)
                record.tokens += (settings.prior_steps - record.tokens) / settings.memory
                record.predicted += (settings.prior_steps - record.predicted) / settings.memory
            record = self._record(arm)
            record.tokens += tokens / requests
            record.predicted += took * expected.tokens / requests
            self._trusted[arm] = True
        elif arm == choice.arm:
            self._change_lost += took - 1.0
            if self._since_change == settings.settling:
                self.change_steps += _LEARNT * (max(0.0, self._change_lost) - self.change_steps)
        if choice.probe:
            lost = took * expected.seconds / choice.best.seconds - tokens / choice.best.tokens
            self._charge(choice.arm, min(lost, settings.first_budget))
        elif self._since_change <= settings.settling and self._pause > 0 and self.last_probe is not None:
            self._charge(self.last_probe.arm, took - 1.0)  # what a probe leaves behind in the caches is its price too

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        probe, found = self.last_probe, None
        if probe is not None:
            mode = "plain" if probe.arm == PLAIN else "draft"
            found = {"mode": mode, "steps": probe.steps, "cost_steps": probe.lost, "steps_ago": probe.ago}
        budget = max(self.budget[1:], default=0.0)
        return {"change_steps": self.change_steps, "probe_budget_steps": max(0.0, budget), "last_probe": found}

    def _lead(self, worth: Mapping[int, float], steps: int) -> int:
        """The best arm, as soon as it would have gained as much as changing to it costs."""
        leader = self._leader if self._leader in worth else PLAIN
        for arm in worth:
            self._missed[arm] = max(0.0, self._missed[arm] + steps * (worth[arm] / worth[leader] - 1.0))
        ready = [
            arm
            for arm in worth
            if self._trusted[arm] and worth[arm] > worth[leader] and self._missed[arm] >= self._change(arm, self._mode)
        ]
        if not ready:
            return leader
        self._missed = [0.0] * len(self._missed)
        return max(ready, key=worth.__getitem__)

    def _goes_on(self, probe: Probe, probes: Mapping[int, Prediction]) -> bool:
        if probe.arm == self._leader or probe.arm not in probes or self.budget[probe.arm] < 0.0:
            return False
        return probe.left > 0 or (
            probe.lost <= 0.0 and probe.steps < self._settings.settling + 2 * self._settings.probe
        )

    def _length(self, arm: int) -> int:
        """Steps of a probe: drafts show at once whether they are accepted, plain steps their speed when settled."""
        return self._settings.probe + (
            self._settings.settling if arm == PLAIN and self._runs_model[self._leader] else 0
        )

    def _cost(self, arm: int, probe: Prediction, reading_s: float, best: Prediction) -> float:
        """Steps of the best arm that a probe is expected to lose."""
        loss = max(0.0, probe.seconds / best.seconds - probe.tokens * self.ratio(arm) / best.tokens)
        return self._length(arm) * loss + reading_s / best.seconds + self._change(arm, self._leader)

    def _change(self, arm: int, other: int) -> float:
        """Steps that changing from one to the other costs; caches hold what a model needs, and nothing for lookups."""
        return self.change_steps if arm != other and (self._runs_model[arm] or self._runs_model[other]) else 0.0

    def _charge(self, arm: int, lost: float) -> None:
        self.budget[arm] = min(self.budget[arm] - lost, 2.0 * self._settings.first_budget)
        probe = self._probe or self.last_probe
        if probe is not None:
            probe.lost += lost

    def _record(self, arm: int) -> _Record:
        """At the present load; a new one starts from its neighbour's."""
        found = self._records.get((arm, self._bucket))
        if found is None:
            near = [bucket for known, bucket in self._records if known == arm]
            prior, ratio = self._settings.prior_steps, 1.0
            if near:
                old = self._records[arm, min(near, key=lambda bucket: abs(bucket - self._bucket))]
                ratio = old.tokens / old.predicted
            found = self._records[arm, self._bucket] = _Record(ratio * prior, prior)
        return found
