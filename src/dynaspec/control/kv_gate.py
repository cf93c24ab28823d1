"""Leaves out the drafter's KV of tokens that will hardly be accepted, whatever the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynaspec.contract.controller import Controller, Explains
from dynaspec.contract.step import DraftView, SpecPlan, StepOutcome, StepView


class KvGate:
    """``kv_write_gating_threshold``: the drafter writes no KV for a token with confidence below ``threshold``.

    After the proposal vllm-project/vllm pull request 28693, on the drafter's side only: a token that is accepted after
    all is caught up by the drafter, and the target's KV is never touched.

    Args:
        threshold: in 0 … 1, above 0.
    """

    def __init__(self, inner: Controller, threshold: float) -> None:
        self._inner = inner
        self._threshold = threshold

    def plan(self, view: StepView) -> SpecPlan:
        plan = self._inner.plan(view)
        return replace(plan, gate_kv_below=self._threshold) if any(plan.depth) else plan

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._inner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        self._inner.observe(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        self._inner.forget(ids)

    def estimates(self) -> Mapping[str, Any]:
        return self._inner.estimates() if isinstance(self._inner, Explains) else {}
