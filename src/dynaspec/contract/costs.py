"""What passes cost, measured when a host starts."""

from __future__ import annotations

from dataclasses import dataclass

Curve = tuple[tuple[int, float], ...]
"""(rows, seconds) of a model pass, rows ascending."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of model passes by their rows, from a few trials at start-up: where online cost models begin."""

    target: Curve = ()
    drafters: tuple[Curve, ...] = ()
    """One curve for each of ``Limits.proposers``; empty for one that runs no model."""
