"""What controllers have in common that change the plans of another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from dynaspec.contract.controller import Controller, Explains
from dynaspec.contract.step import DraftView, SpecPlan, StepOutcome, StepView

Inner = TypeVar("Inner", bound=Controller)


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
