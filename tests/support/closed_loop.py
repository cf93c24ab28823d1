"""A decode loop without a model: a drafter with known acceptance, steps with known cost, any controller."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dynaspec.contract.controller import Controller
from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import (
    DraftView,
    Ended,
    Limits,
    ProposerTraits,
    SpecPlan,
    StepOutcome,
    StepView,
    StopRule,
    Work,
)

LONGEST = 16
LIMITS = Limits(draft_lens=tuple(range(LONGEST + 1)), proposers=(ProposerTraits("draft_model"),))
TARGET_MS = ((1, 2.0), (8, 2.3), (16, 3.6), (32, 6.4), (64, 12.0), (512, 92.0))
CALL_S, PASS_S, ROW_S, HOST_S = 0.15e-3, 0.35e-3, 0.012e-3, 0.3e-3
COSTS = PassCosts(
    target=tuple((rows, ms / 1e3) for rows, ms in TARGET_MS[:5]),
    drafters=(((1, PASS_S + ROW_S), (16, PASS_S + 16 * ROW_S)),),
)


def target_s(rows: int) -> float:
    return float(np.interp(rows, *zip(*TARGET_MS, strict=True))) / 1e3


@dataclass(slots=True)
class Trace:
    """What a run did, step by step."""

    emitted: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    plans: list[SpecPlan] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return sum(self.emitted) / sum(self.seconds)

    def mean_length(self, first: int, end: int) -> float:
        return float(np.mean(self.lengths[first:end]))


@dataclass(slots=True)
class Loop:
    """``requests`` run for ever. A token's confidence c is calibrated: it is accepted with chance quality · c^1.2."""

    requests: int
    seed: int = 0
    quality: Callable[[int, int], float] = lambda step, request: 1.0
    confidence: float | None = None
    """Shown instead of the true one."""
    noise: float = 0.1
    limits: Limits = LIMITS
    row_s: float = 0.0
    """What a row of the target takes on top of ``target_s``."""

    def run(self, controller: Controller, steps: int) -> Trace:
        rng, trace, lag = np.random.default_rng(self.seed), Trace(), [0] * self.requests
        for step in range(steps):
            view = self._view(step, lag)
            plan = controller.plan(view)
            confidence, right = self._draft(rng, step, plan)
            lens = tuple(map(len, confidence))
            trimmed = controller.trim(view, plan, DraftView(lens, confidence))
            verified = tuple(map(min, lens, trimmed.depth))
            accepted = tuple(_run(row[:n]) for row, n in zip(right, verified, strict=True))
            passes = tuple(sum(n > j for n in lens) for j in range(max(lens)))
            if passes:
                passes = (passes[0] + sum(lag[r] for r, n in enumerate(lens) if n), *passes[1:])
            lag = [0 if n else lag[r] + 1 for r, n in enumerate(lens)]
            outcome = self._outcome(rng, view, plan, (lens, verified, accepted), confidence, passes)
            controller.observe(outcome)
            trace.emitted.append(sum(outcome.emitted))
            trace.seconds.append(outcome.step_s)
            trace.lengths.append(sum(lens) / self.requests)
            trace.plans.append(trimmed)
        return trace

    def _view(self, step: int, lag: list[int]) -> StepView:
        many = (10**6,) * self.requests
        return StepView(
            step=step,
            ids=tuple(map(str, range(self.requests))),
            context_len=(200,) * self.requests,
            room_depth=many,
            room_nodes=many,
            max_draft=(None,) * self.requests,
            temperature=(0.0,) * self.requests,
            lag=(tuple(lag),),
            offers=(None,),
            prefill_tokens=0,
            waiting=0,
            limits=self.limits,
        )

    def _draft(
        self, rng: np.random.Generator, step: int, plan: SpecPlan
    ) -> tuple[tuple[tuple[float, ...], ...], list[list[bool]]]:
        shown: list[list[float]] = [[] for _ in plan.depth]
        right: list[list[bool]] = [[] for _ in plan.depth]
        survival = [1.0] * len(plan.depth)
        running = [r for r, depth in enumerate(plan.depth) if depth]
        j = 0
        while running:
            for r in running:
                c = 0.05 + 0.95 / (1 + math.exp(-rng.normal(1.6, 2.0)))
                right[r].append(bool(rng.random() < self.quality(step, r) * c**1.2))
                shown[r].append(c if self.confidence is None else self.confidence)
                if plan.stop is not None:
                    survival[r] *= _chance(plan.stop, shown[r][-1], j, r)
            if plan.stop is not None:
                running = _still_running(plan.stop, running, survival, [row[-1] if row else 0.0 for row in shown], j)
            j += 1
            running = [r for r in running if plan.depth[r] > j]
        return tuple(map(tuple, shown)), right

    def _outcome(
        self,
        rng: np.random.Generator,
        view: StepView,
        plan: SpecPlan,
        counts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
        confidence: tuple[tuple[float, ...], ...],
        passes: tuple[int, ...],
    ) -> StepOutcome:
        lens, verified, accepted = counts
        ended: list[Ended] = [
            "none" if not n else "rejected" if a < v else "all_accepted"
            for n, v, a in zip(lens, verified, accepted, strict=True)
        ]
        rows = self.requests + sum(verified)
        verify_s = (target_s(rows) + self.row_s * rows) * max(0.7, rng.normal(1, self.noise))
        draft_s = CALL_S + PASS_S * len(passes) + ROW_S * sum(passes) if passes else 0.0
        return StepOutcome(
            plan_step=view.step,
            ids=view.ids,
            proposer=plan.proposer,
            requested=plan.depth,
            drafted=lens,
            verified=verified,
            accepted=accepted,
            emitted=tuple(a + 1 for a in accepted),
            ended=tuple(ended),
            early_exit=tuple(n < depth for n, depth in zip(lens, plan.depth, strict=True)),
            confidence=confidence,
            work=Work(rows_per_pass=passes, verify_rows=rows),
            draft_s=draft_s,
            verify_s=verify_s,
            step_s=draft_s + verify_s + HOST_S,
        )


def _chance(rule: StopRule, confidence: float, j: int, request: int) -> float:
    c = min(max(confidence, 0.0025), 0.9975)
    bias = rule.bias[min(j, len(rule.bias) - 1)] if rule.bias else 0.0
    offset = rule.offset[request] if rule.offset else 0.0
    return 1 / (1 + math.exp(-(rule.weight * math.log(c / (1 - c)) + bias + offset)))


def _still_running(
    rule: StopRule, running: list[int], survival: list[float], confidence: list[float], j: int
) -> list[int]:
    signal = survival if rule.signal == "survival" else confidence
    below = rule.below[min(j, len(rule.below) - 1)]
    left = [r for r in running if signal[r] >= below]
    if rule.total_below:
        total = sum(signal[r] - below for r in left)
        if total < rule.total_below[min(j, len(rule.total_below) - 1)]:
            return []
    return left


def _run(right: list[bool]) -> int:
    return next((n for n, ok in enumerate(right) if not ok), len(right))
