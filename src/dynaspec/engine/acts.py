"""A step between its acts: planned, or run."""

from __future__ import annotations

from dataclasses import dataclass

from dynaspec.contract.proposer import Drafts, Offers
from dynaspec.contract.step import DraftView, SpecPlan, StepView
from dynaspec.schedule.batch import StepBatch

from .target import Verified


@dataclass(slots=True)
class ScheduledStep:
    """A step that has been planned."""

    batch: StepBatch
    view: StepView
    plan: SpecPlan
    began_s: float
    """When planning began, by the engine's clock."""
    plan_s: float = 0.0
    """Seconds that the controller's plan took."""
    offers: tuple[Offers | None, ...] = ()
    """What each proposer was found to offer before the plan."""


@dataclass(slots=True)
class ExecutedStep:
    """A step that has been run, but not committed."""

    scheduled: ScheduledStep
    drafts: Drafts
    drafted: DraftView
    """The controller's view of them."""
    plan: SpecPlan
    """After the trim."""
    verified: Verified
    draft_s: float
    verify_s: float
