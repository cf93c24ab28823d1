"""Traces, costs and controllers for tests of the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import Controller, DraftView, Limits, SpecPlan, StepOutcome, StepView
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from dynaspec.simulate.costs import CurveCosts
from dynaspec.simulate.traces import Lengths, Synthetic, Trace


def synthetic(requests: int = 20, acceptance: float = 0.7, *, seed: int = 0, **fields: Any) -> Trace:
    """Short requests unless ``fields`` says otherwise."""
    options: dict[str, Any] = {"prompt": Lengths(20, 0.4), "output": Lengths(24, 0.6)} | fields
    return Synthetic(requests, (acceptance,), **options).draw(np.random.default_rng(seed))


def flat_costs(target_s: float = 1.0, drafter_s: float = 0.1) -> CurveCosts:
    """Passes that cost the same whatever their rows."""
    return CurveCosts(PassCosts(target=((1, target_s),), drafters=(((1, drafter_s),),)))


def production(**keys: Any) -> Any:
    """A factory of the controller that an engine would build; plain decoding without keys."""
    config = SpeculativeConfig.parse({"method": "draft_model", "model": "simulated", **keys}) if keys else None
    return lambda limits: build_controller(config, limits)


class Spy:
    """A controller that keeps what passes through another."""

    def __init__(self, inner: Controller) -> None:
        self.inner = inner
        self.views: list[StepView] = []
        self.plans: list[SpecPlan] = []
        self.drafts: list[DraftView] = []
        self.outcomes: list[StepOutcome] = []
        self.forgotten: list[str] = []

    def plan(self, view: StepView) -> SpecPlan:
        self.views.append(view)
        self.plans.append(self.inner.plan(view))
        return self.plans[-1]

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        self.drafts.append(drafts)
        return self.inner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        self.inner.observe(outcome)

    def forget(self, ids: Any) -> None:
        self.forgotten += ids
        self.inner.forget(ids)


class Spying:
    """A factory that keeps the spy it made."""

    def __init__(self, factory: Any) -> None:
        self._factory = factory

    def __call__(self, limits: Limits) -> Controller:
        self.spy = Spy(self._factory(limits))
        return self.spy
