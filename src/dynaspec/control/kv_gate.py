"""Leaves out the drafter's KV of tokens that will hardly be accepted, whatever the policy."""

from __future__ import annotations

from dataclasses import replace

from dynaspec.contract.controller import Controller
from dynaspec.contract.step import SpecPlan, StepView

from .wrapper import Wrapper


class KvGate(Wrapper[Controller]):
    """``kv_write_gating_threshold``: the drafter writes no KV for a token with confidence below ``threshold``.

    After the proposal vllm-project/vllm pull request 28693, on the drafter's side only: a token that is accepted after
    all is caught up by the drafter, and the target's KV is never touched.

    Args:
        threshold: in 0 … 1, above 0.
    """

    def __init__(self, inner: Controller, threshold: float) -> None:
        super().__init__(inner)
        self._threshold = threshold

    def plan(self, view: StepView) -> SpecPlan:
        plan = self._inner.plan(view)
        return replace(plan, gate_kv_below=self._threshold) if any(plan.depth) else plan
