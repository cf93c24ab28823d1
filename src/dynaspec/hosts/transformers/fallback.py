"""A controller that fails costs no request: the host goes on as it would by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dynaspec.contract.controller import Controller, Explains
from dynaspec.contract.step import DraftView, SpecPlan, StepOutcome, StepView

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class FallbackController:
    """``inner`` until it raises; then ``otherwise``, for good."""

    def __init__(self, inner: Controller, otherwise: Controller) -> None:
        self._inner = inner
        self._otherwise = otherwise

    def plan(self, view: StepView) -> SpecPlan:
        return self._call("plan", lambda controller: controller.plan(view))

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._call("trim", lambda controller: controller.trim(view, plan, drafts))

    def observe(self, outcome: StepOutcome) -> None:
        self._call("observe", lambda controller: controller.observe(outcome))

    def forget(self, ids: Sequence[str]) -> None:
        self._call("forget", lambda controller: controller.forget(ids))

    def estimates(self) -> Mapping[str, Any]:
        """Those of the controller that decides."""
        return self._call("estimates", lambda one: one.estimates() if isinstance(one, Explains) else {})

    def _call(self, name: str, call: Callable[[Controller], _T]) -> _T:
        try:
            return call(self._inner)
        except Exception:  # whatever it is, it must not cost the request
            if self._inner is self._otherwise:
                raise
            logger.exception("the controller failed in %s; drafts have a constant length from now on", name)
            self._inner = self._otherwise
            return call(self._inner)
