"""Every number of ``auto`` that could be another one."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..estimate.acceptance import AcceptanceSettings
from ..estimate.costs import CostSettings


@dataclass(frozen=True, slots=True)
class AutoSettings:
    """Defaults are meant for every machine; ``docs/auto.md`` shows what halving and doubling each changes."""

    acceptance: AcceptanceSettings = field(default_factory=AcceptanceSettings)
    costs: CostSettings = field(default_factory=CostSettings)
    loss_budget: float = 0.008
    """Share of all steps that probes of what seems slower may cost."""
    first_budget: float = 2.0
    """Steps that probes may cost at the start, and that are saved up for them otherwise."""
    settling: int = 3
    """Steps after a change of mode that tell nothing of later ones, as caches hold what the other mode needs."""
    probe: int = 4
    """Steps of a probe; those of plain decoding follow settling."""
    hope: float = 1.0
    """Standard deviations by which acceptance may be better than estimated in what a probe drafts."""
    prior_steps: float = 16.0
    """Steps as predicted that measured ones of an arm are joined to."""
    memory: float = 256.0
    """Steps of an arm after which an earlier one counts e times less."""
    pay_off: float = 32.0
    """Steps over which reading what a drafter lacks of a request is paid off, if the request has so many left."""
    probe_context: int = 32
    """Tokens that a probe reads of a request of which the drafter lacks more, where the proposer can do with so few."""
    planning_share: float = 0.0025
    """Share of the time that planning may take: plans are repeated for some steps where steps are short."""
