"""Plain decoding, and controllers that change the plans of another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from dynaspec.contract.step import Controller, DraftView, Explains, Needs, SpecPlan, StepOutcome, StepView

Inner = TypeVar("Inner", bound=Controller)


def plain_plan(view: StepView, *, next_needs: Needs = "all") -> SpecPlan:
    """A plan with draft length 0 for every request."""
    zeros = (0,) * len(view.ids)
    return SpecPlan(step=view.step, depth=zeros, proposer=zeros, nodes=zeros, next_needs=next_needs)


class PlainController:
    """k = 0: the engine without speculation."""

    def plan(self, view: StepView) -> SpecPlan:
        return plain_plan(view)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""

    def forget(self, ids: Sequence[str]) -> None:
        """Nothing was kept."""


class Wrapper(Generic[Inner]):
    """Passes everything on to ``inner``."""

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    def plan(self, view: StepView) -> SpecPlan:
        return self._inner.plan(view)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._inner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        self._inner.observe(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        self._inner.forget(ids)

    def estimates(self) -> Mapping[str, Any]:
        return self._inner.estimates() if isinstance(self._inner, Explains) else {}


class OffSwitch(Wrapper[Controller]):
    """``disable_by_batch_size``: plain decoding while more than ``above`` requests decode, else ``inner``.

    Requests that only prefill or wait do not count: they add no rows that compete with drafts for long, and
    counting them would switch speculation off at every arrival.
    """

    def __init__(self, inner: Controller, above: int) -> None:
        super().__init__(inner)
        self._above = above

    def plan(self, view: StepView) -> SpecPlan:
        return plain_plan(view) if len(view.ids) > self._above else self._inner.plan(view)


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
