"""A recorded decision log put to a controller again: does it decide alike?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dynaspec.contract.controller import Controller
from dynaspec.contract.step import SpecPlan
from dynaspec.observe.log_reader import ForgetCall, ObserveCall, PlanCall, TrimCall, read_calls


@dataclass(frozen=True, slots=True)
class Difference:
    """A call that was answered otherwise than when it was recorded."""

    line: int
    """Of the log."""
    step: int
    call: Literal["plan", "trim"]
    recorded: SpecPlan
    replayed: SpecPlan

    def __str__(self) -> str:
        fields = [
            f"{name} was {before!r} and is {now!r}"
            for name in SpecPlan.__dataclass_fields__
            if (before := getattr(self.recorded, name)) != (now := getattr(self.replayed, name))
        ]
        return f"line {self.line}, {self.call} of step {self.step}: {'; '.join(fields)}"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """How a controller did on a recorded log."""

    plans: int
    """``plan`` calls replayed."""
    trims: int
    different: int
    """Answers that were not the recorded ones."""
    first: Difference | None
    """The first of them. Later ones may be its consequence: the recorded outcome is not that of the new plan."""

    @property
    def identical(self) -> bool:
        return self.different == 0


def replay(path: str | Path, controller: Controller) -> ReplayResult:
    """Makes the recorded calls in their order, whatever the controller answers, and compares the answers.

    Args:
        controller: as it was when the recording began: freshly built, with the same configuration, seed and costs.

    Raises:
        ConfigError: the log cannot be read or is malformed.
    """
    plans = trims = different = 0
    first: Difference | None = None
    for call in read_calls(path):
        match call:
            case PlanCall():
                plans += 1
                found = _compared(call, "plan", call.plan, controller.plan(call.view))
            case TrimCall():
                trims += 1
                found = _compared(call, "trim", call.trimmed, controller.trim(call.view, call.plan, call.drafts))
            case ObserveCall():
                controller.observe(call.outcome)
                continue
            case ForgetCall():
                controller.forget(call.ids)
                continue
        if found is not None:
            different += 1
            first = first or found
    return ReplayResult(plans, trims, different, first)


def _compared(
    call: PlanCall | TrimCall, name: Literal["plan", "trim"], recorded: SpecPlan, replayed: SpecPlan
) -> Difference | None:
    return None if replayed == recorded else Difference(call.line, call.step, name, recorded, replayed)
