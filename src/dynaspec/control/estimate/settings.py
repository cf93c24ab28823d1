"""Every number of ``auto`` and its estimators that could be another one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AutoSettings:
    """Defaults are meant for every machine; ``docs/auto.md`` shows what halving and doubling each changes. Constants
    beside them are guards of the arithmetic, and guesses at what has not been measured yet."""

    prior: float = 0.7
    """Chance that a drafted token is accepted, before anything is known."""
    prior_information: float = 0.75
    """What the prior counts for at the first position, and each position at the next one. An outcome of chance p brings
    p·(1 − p)."""
    memory: float = 256.0
    """Outcomes at a position, and steps of an arm, after which an earlier one counts e times less."""
    surprise: float = 2.0
    """Nats by which the mean of the latest outcomes may tell them better; e times more is forgotten for each beyond."""
    recent: float = 8.0
    """Outcomes that the latest are."""
    request_memory: float = 32.0
    """Steps after which what was seen of a request counts e times less."""
    request_shrinkage: float = 2.0
    """Outcomes like the average request's that a request's own are joined to."""
    error: float = 0.15
    """Standard deviation of the logarithm of what start-up has measured of drafting and of the curve's slope."""
    noise: float = 0.12
    """The same of a measured time."""
    drift: float = 0.007
    """The same of the speed factor's change in a step."""
    loss_budget: float = 0.01
    """Share of all steps that probes of what seems slower may cost; what comes up in ``memory`` steps is there at first
    and is saved at most."""
    settling: int = 3
    """Steps after a change of mode that tell nothing of later ones, as caches hold what the other mode needs."""
    change_steps: float = 0.5
    """Steps that such a change costs, until it has been seen."""
    probe: int = 4
    """Steps of a probe, and of the best arm for each of them; those of plain decoding follow settling."""
    probe_price: float = 1.5
    """Times what a token is worth that a probe drafts for: what nearly pays tells more than what loses least."""
    prior_steps: float = 16.0
    """Steps as predicted that measured ones of an arm are joined to."""
    pay_off: float = 32.0
    """Steps over which reading what a drafter lacks of a request is paid off, if the request has so many left."""
    probe_context: int = 32
    """Latest tokens that each step of a probe reads of a request, where the drafter is further behind than all steps of
    the probe would read, and where the proposer can draft from that context."""
    planning_s: float = 5e-4
    """Seconds of looking at drafts before they are verified, about, on a server's CPU: what cannot save as much is not
    looked at. And of making a plan, until that has been measured."""
    planning_share: float = 0.0025
    """Share of the time that planning may take: plans are repeated for some steps where steps are short."""
