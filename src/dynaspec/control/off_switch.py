"""Switches speculation off while many requests run, whatever the policy."""

from __future__ import annotations

from dynaspec.contract.controller import Controller
from dynaspec.contract.step import SpecPlan, StepView

from .plain import plain_plan
from .wrapper import Wrapper


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
