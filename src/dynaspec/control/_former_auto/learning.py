"""What steps teach ``auto``: what they cost, what came of their drafts, and whether that was as predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import ProposerTraits, StepOutcome

from .acceptance import Places, Verdicts
from .agreement import Pending
from .columns import drafting_before, drafting_in, drafting_of, evidence_of_all, lacks_of, matches_of
from .costs import StepCosts
from .drafter import Drafter
from .guard import PlainGuard
from .lookup_drafter import LookupDrafter

Ints = npt.NDArray[np.int64]

_HOST_FORGET = 0.9
_SETTLED_AFTER = {True: 2, False: 4}
"""Steps that draft, or do not, of which nothing is learnt after one of the other kind: caches hold what that needs, so
steps of either kind look dear among those of the other."""
_PROMPTS = 64
"""Prefilled rows that leave nothing else in the caches: the step after them tells nothing of what others cost."""
_COLD = 10
"""First steps of a host that was measured at start-up: they run code that has hardly run before, and tell nothing of
what later ones take."""
_ALL_WEIGHED = 200
"""What steps cost is learnt from the first ones all, then from one of those that tell the same."""


class Learner:
    """Keeps steps until they are read, several at a time."""

    def __init__(
        self,
        traits: Sequence[ProposerTraits],
        drafters: Sequence[Drafter],
        costs: StepCosts,
        guard: PlainGuard,
        places: Places,
    ) -> None:
        """
        Args:
            traits: of the host's proposers, of which each has one of ``drafters``; all else is taught.
        """
        self._host_s: dict[bool, float] = {}
        self.steps = self.drafts = 0
        """Read so far: all, and those that drafted."""
        self._traits = traits
        self._drafters = drafters
        self._costs = costs
        self._guard = guard
        self._places = places
        self._unread: list[tuple[StepOutcome, Pending | None]] = []
        self._passed = 0
        """Steps that nothing is learnt from, as others tell the same."""
        self._ended: list[str] = []
        self._drafter_ran, self._since_change = False, _SETTLED_AFTER[False]
        """Whether the drafter ran in the latest step that was read; steps since that was otherwise."""
        self._after_prompts = False
        self._weighed = 0

    def host_s(self, *, drafts: bool) -> float:
        """What a step takes beside drafting and verifying. Those that draft take more: more tokens become output."""
        return self._host_s.get(drafts, self._host_s.get(not drafts, 0.0))

    @property
    def unread(self) -> int:
        return len(self._unread)

    def add(self, outcome: StepOutcome, pending: Pending | None) -> None:
        """A step to be read; with what was noted as it was planned."""
        self._unread.append((outcome, pending))

    def pass_over(self) -> None:
        """A step that is not worth reading."""
        self._passed += 1

    def forget(self, ids: Sequence[str]) -> None:
        """Requests have ended; what they have taught is read first."""
        self._ended.extend(ids)

    def rename(self, ids: Sequence[str]) -> None:
        """Some of these may bear the name of one that has ended."""
        if self._ended and not set(self._ended).isdisjoint(ids):
            self.read()

    def read(self) -> None:
        """Learns from the steps observed since the last time."""
        unread, steps = self._unread, len(self._unread) + self._passed
        settled = self.steps >= _ALL_WEIGHED
        for outcome, pending in unread:
            self._weigh(outcome, pending, pending.alike if settled and pending is not None else 1)
        drafted = [(outcome, pending) for outcome, pending in unread if any(outcome.drafted)]
        if drafted:
            self.drafts += len(drafted)
            self._learn(drafted)
        unread.clear()
        self._passed = 0
        self.steps += steps
        ended = self._places.forget(self._ended) if self._ended else None
        self._ended.clear()
        for drafter in self._drafters:
            drafter.age(steps, len(drafted))
            if ended is not None:
                drafter.retire(ended)

    def _weigh(self, outcome: StepOutcome, pending: Pending | None, every: int) -> None:
        """What a step cost, against what was expected of it; one in ``every`` of its kind stands for all."""
        work, whole = outcome.work, outcome.verify_s == 0.0
        drafting = drafting_in(work, self._traits) if whole else None
        ran = drafting is not None if whole else bool(work.rows_per_pass)
        self._since_change = self._since_change + 1 if ran == self._drafter_ran else 0
        self._drafter_ran = ran
        after_prompts, self._after_prompts = self._after_prompts, work.prefill_rows > _PROMPTS
        if pending is not None and pending.mode == "probe_draft" and any(outcome.requested) and not work.prefill_rows:
            # Where a plan is drafted in the step before the one that verifies it, the trial took part of that one too.
            before = drafting_before(outcome, self._traits) if whole and not ran else None
            before_s = 0.0 if before is None else self._costs.draft_s(before)
            lost = pending.plain.steps_lost(sum(outcome.emitted), outcome.step_s + before_s)
            all_right = any(outcome.drafted) and outcome.accepted == outcome.drafted
            self._guard.tried(lost, good=all_right, hit=any(outcome.accepted))
        elif pending is not None and pending.by_look_ups_alone and outcome.step_s > 0.0 and not work.prefill_rows:
            self._guard.looked_up(pending.plain.steps_lost(sum(outcome.emitted), outcome.step_s))
        passed_over = outcome.plan_step % every
        self._weighed += 1
        cold = self._costs.measured and self._weighed <= _COLD
        if passed_over or cold or after_prompts or self._since_change < _SETTLED_AFTER[ran]:
            return
        rows = work.verify_rows + work.prefill_rows
        read = work.kv_tokens * len(outcome.ids) / rows if rows else 0.0
        if whole:
            self._costs.observe_whole(rows, work.kv_tokens, read, outcome.step_s, drafting)
        else:
            drafting = drafting_of(outcome, self._traits)
            self._costs.observe(rows, work.kv_tokens, read, outcome.verify_s, drafting)
        tried = pending is not None and pending.mode == "probe_draft"  # it looks dear among steps that do not draft
        if outcome.ids and not work.prefill_rows and outcome.step_s > 0.0 and not tried:
            host = 0.0 if whole else max(0.0, outcome.step_s - outcome.draft_s - outcome.verify_s)
            usual = self._host_s.get(ran, host)
            self._host_s[ran] = _HOST_FORGET * usual + (1 - _HOST_FORGET) * min(host, 3.0 * usual)
            if pending is not None:
                trial, emitted = pending.mode == "probe_plain", sum(outcome.emitted)
                weight = (1.0 - pending.found) * every
                self._guard.observe(pending.prediction, emitted, outcome.step_s, trial=trial, weight=weight)

    def _learn(self, steps: Sequence[tuple[StepOutcome, Pending | None]]) -> None:
        """Accepted tokens and first rejections, to the models of the proposers that they came from, in their order."""
        outcomes = [outcome for outcome, _ in steps]
        accepted = [a for outcome in outcomes for a in outcome.accepted]
        ends = [end for outcome in outcomes for end in outcome.ended]
        tested = [a + (end in ("rejected", "invalid")) for a, end in zip(accepted, ends, strict=True)]
        counts = np.array(([n for outcome in outcomes for n in outcome.drafted], tested, accepted))
        place = self._places.find([request for outcome in outcomes for request in outcome.ids])
        seen = Verdicts(place, *counts)
        evidence = evidence_of_all(outcomes)
        proposer = np.array([p for outcome in outcomes for p in outcome.proposer])
        for index, drafter in enumerate(self._drafters):
            mine = proposer == index
            if (mine & (seen.drafted > 0)).any():
                seen.place = place if mine.all() else np.where(mine, place, -1)
                basis = matches_of if isinstance(drafter, LookupDrafter) else lacks_of
                drafter.observe(seen, evidence, basis(steps, index))
