"""Decision logs of a made-up host, whose acceptance and costs are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dynaspec.contract.step import DraftView, Limits, ProposerTraits, SpecPlan, StepOutcome, StepView, StopRule, Work
from dynaspec.observe.decision_log import DecisionLog, LoggedController

STEP_S, ROW_S, KV_S, READ_S, PASS_S, DRAFT_ROW_S, REST_S = 0.004, 0.0005, 1e-7, 1e-6, 0.0003, 0.00005, 0.0002
"""What the host's work costs."""


HOST = Limits(tuple(range(9)), proposers=(ProposerTraits("draft_model"),))


@dataclass
class Fixed:
    """A controller that always wants the same."""

    length: int
    stop: StopRule | None = None
    believed: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, view: StepView) -> SpecPlan:
        depth = tuple(min(self.length, room) for room in view.room_depth)
        return SpecPlan(view.step, depth, (0,) * len(depth), depth, stop=self.stop)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return plan

    def observe(self, outcome: StepOutcome) -> None: ...

    def forget(self, ids: Sequence[str]) -> None: ...

    def estimates(self) -> Mapping[str, Any]:
        return self.believed


@dataclass
class Host:
    """Runs a controller on drafts of which each token is right with a probability of its position's.

    Args:
        rates: conditional acceptance by position; the last one goes on.
        slow: factor on a step's seconds, by step.
    """

    path: Path
    rates: Sequence[float] = (0.8,)
    ids: Sequence[str] = ("a", "b")
    seed: int = 0
    limits: Limits = HOST
    header: Mapping[str, Any] = field(default_factory=dict)
    slow: Callable[[int], float] = lambda step: 1.0
    timed: bool = True
    prefill: int = 0
    offers: Callable[[int], tuple[tuple[int, int], ...]] | None = None
    signal: float | None = None
    """The signal of each token; None = that of its confidence."""
    whole: bool = False
    """Drafting and verification are not timed apart."""
    silent: bool = False
    """The drafter has no confidence."""

    def run(self, controller: Fixed, steps: int, **view: Any) -> Path:
        random = np.random.default_rng(self.seed)
        log = DecisionLog(self.path, self.header)
        logged = LoggedController(controller, log)
        for step in range(steps):
            self._step(logged, step, random, view)
        log.close()
        return self.path

    def _step(self, logged: LoggedController, step: int, random: np.random.Generator, columns: dict[str, Any]) -> None:
        size = len(self.ids)
        values: dict[str, Any] = {
            "ids": tuple(self.ids),
            "context_len": (50 + step,) * size,
            "room_depth": (100,) * size,
            "max_draft": (None,) * size,
            "temperature": (0.0,) * size,
            "lag": ((0,) * size,),
            "offers": (self.offers(step) if self.offers else None,),
        } | columns
        view = StepView(
            step=step,
            prefill_tokens=self.prefill,
            waiting=1,
            limits=self.limits,
            room_nodes=values["room_depth"],
            **values,
        )
        plan = logged.plan(view)
        drafted = plan.depth
        if self.offers:
            drafted = tuple(min(n, offer[1]) for n, offer in zip(drafted, self.offers(step), strict=True))
        hidden = [[self._rate(j) for j in range(n)] for n in drafted]
        right = [random.random(n) < rates for n, rates in zip(drafted, hidden, strict=True)]
        runs = [int(np.cumprod(row).sum()) for row in right]
        confidence = tuple(() if self.silent else tuple(map(float, rates)) for rates in hidden)
        signal = () if self.signal is None else tuple((self.signal,) * n for n in drafted)
        logged.trim(view, plan, DraftView(drafted, confidence, signal))
        logged.observe(replace(self._outcome(view, plan, drafted, runs, confidence), signal=signal))
        logged.forget([])

    def _outcome(
        self,
        view: StepView,
        plan: SpecPlan,
        drafted: tuple[int, ...],
        runs: list[int],
        confidence: tuple[tuple[float, ...], ...],
    ) -> StepOutcome:
        lookup = any(proposer.passes_per_draft == "none" for proposer in self.limits.proposers)
        rows = sum(drafted) + len(drafted)
        kv = sum((n + 1) * context for n, context in zip(drafted, view.context_len, strict=True))
        per_pass = () if lookup else tuple(sum(n > j for n in drafted) for j in range(max(drafted, default=0)))
        slow = self.slow(view.step) if self.timed else 0.0
        draft = slow * (PASS_S * len(per_pass) + DRAFT_ROW_S * sum(per_pass))
        verify = slow * (STEP_S + ROW_S * (rows + self.prefill) + KV_S * kv + READ_S * sum(view.context_len))
        return StepOutcome(
            plan_step=view.step,
            ids=view.ids,
            proposer=(0,) * len(drafted),
            requested=plan.depth,
            drafted=drafted,
            verified=drafted,
            accepted=tuple(runs),
            emitted=tuple(run + 1 for run in runs),
            ended=tuple(
                "none" if n == 0 else "all_accepted" if run == n else "rejected"
                for n, run in zip(drafted, runs, strict=True)
            ),
            early_exit=(False,) * len(drafted),
            confidence=confidence,
            work=Work(per_pass, rows, kv, self.prefill),
            draft_s=0.0 if self.whole else draft,
            verify_s=0.0 if self.whole else verify,
            step_s=draft + verify + slow * REST_S,
        )

    def _rate(self, position: int) -> float:
        return self.rates[min(position, len(self.rates) - 1)]
