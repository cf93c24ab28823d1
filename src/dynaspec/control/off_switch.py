"""Switches speculation off while many requests run, whatever the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynaspec.contract.controller import Controller, Explains
from dynaspec.contract.step import DraftView, SpecPlan, StepOutcome, StepView

from .plain import plain_plan


class OffSwitch:
    """``disable_by_batch_size``: plain decoding while more than ``above`` requests decode, else ``inner``.

    Requests that only prefill or wait do not count: they add no rows that compete with drafts for long, and
    counting them would switch speculation off at every arrival.
    """

    def __init__(self, inner: Controller, above: int) -> None:
        self._inner = inner
        self._above = above

    def plan(self, view: StepView) -> SpecPlan:
        return plain_plan(view) if len(view.ids) > self._above else self._inner.plan(view)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._inner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        self._inner.observe(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        self._inner.forget(ids)

    def estimates(self) -> Mapping[str, Any]:
        return self._inner.estimates() if isinstance(self._inner, Explains) else {}
