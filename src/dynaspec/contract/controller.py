"""The protocol between a host and whoever decides draft lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from .step import DraftView, SpecPlan, StepOutcome, StepView


class Controller(Protocol):
    """Decides how much to draft and to verify. Pure: no clock, no tensors, no randomness but a seeded one."""

    def plan(self, view: StepView) -> SpecPlan:
        """Draft lengths for this step; within the view's rooms, the limits and what requests asked for."""
        ...

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        """How many of the drafted tokens to verify (``depth`` never above what was drafted).

        Causal: a request's cut may depend on its tokens up to the cut and on other requests, never on its own
        tokens behind the cut.
        """
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learns from a step; may come late, and out of order by one."""
        ...

    def forget(self, ids: Sequence[str]) -> None:
        """These requests have ended."""
        ...


@runtime_checkable
class Explains(Protocol):
    """A controller that can say what it believes; for metrics, the decision log and people."""

    def estimates(self) -> Mapping[str, Any]:
        """Plain JSON values: what the latest decision rested on."""
        ...
