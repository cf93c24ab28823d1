"""What ``auto`` begins with: its drafters, and costs from a saved profile where none were measured."""

from __future__ import annotations

from dataclasses import replace

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import Limits

from ..profile import Profile
from .costs import StepCosts
from .drafter import Drafter, ModelDrafter
from .lookup_drafter import LookupDrafter


def with_profile(costs: PassCosts, profile: Profile | None) -> PassCosts:
    """Where no passes were measured, plain decoding of a saved profile: a step of b requests has b rows."""
    if costs.target or profile is None:
        return costs
    curve = tuple((batch, profile.itl_ms(batch, 0) / 1e3) for batch in sorted(profile.batch_stats))
    return replace(costs, target=curve)


def make_drafters(limits: Limits, costs: StepCosts, profile: Profile | None) -> list[Drafter]:
    """One for each of the host's proposers."""
    rates = profile.acceptance_rate_per_pos if profile is not None else ()
    # Lengths are rounded before drafting, not after: where few can run, or all must be alike, drafts cannot end early.
    can_stop = limits.can_stop and limits.ragged and dense(limits)
    return [
        LookupDrafter(index, costs, rates)
        if traits.passes_per_draft == "none"
        else ModelDrafter(traits, index, costs, rates, can_stop)
        for index, traits in enumerate(limits.proposers)
    ]


def dense(limits: Limits) -> bool:
    """Whether every draft length up to the longest can run."""
    return len(limits.draft_lens) == limits.draft_lens[-1] + 1
