"""What passes cost, measured when a host starts."""

from __future__ import annotations

from dataclasses import dataclass

Curve = tuple[tuple[int, float], ...]
"""(rows, seconds) of a model pass, rows ascending."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of model passes by their rows, from a few trials at start-up: where online cost models begin."""

    target: Curve = ()
    """Rows that see next to no context."""
    drafters: tuple[Curve, ...] = ()
    """One curve for each of ``Limits.proposers``, of the passes after a draft's first, over rows that see some hundred
    KV entries; empty for one that runs no model."""
    first_s: tuple[float, ...] = ()
    """For each proposer, what a draft's first pass takes on top: the target's pass has emptied the caches."""
    context_s: float = 0.0
    """What a row of the target takes for each KV entry that it sees."""
    read_s: float = 0.0
    """What a request takes for each of its KV entries, however many rows see it."""
