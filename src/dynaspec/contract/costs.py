"""What passes cost, measured when a host starts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

_TYPICAL_ROW, _FARTHEST = 0.03, 4096
"""A row, as a share of a pass, where a curve has one point only; most rows to which a curve is continued."""

Curve = tuple[tuple[int, float], ...]
"""(rows, seconds) of a model pass, rows ascending."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of model passes by their rows, from a few trials at start-up: where online cost models begin."""

    target: Curve = ()
    """Rows that see next to no context."""
    drafters: tuple[Curve, ...] = ()
    """One curve for each of ``Limits.proposers``, of the passes after a draft's first, over rows that see some hundred
    KV entries, or over tokens, where a pass gives several a row; empty for one that runs no model."""
    first_s: tuple[float, ...] = ()
    """For each proposer, what a draft's first pass takes on top: the target's pass has emptied the caches."""
    context_s: float = 0.0
    """What a row of the target takes for each KV entry that it sees."""
    read_s: float = 0.0
    """What a request takes for each of its KV entries, however many rows see it."""

    def target_points(self) -> list[tuple[float, float]]:
        """The target's curve made non-decreasing, with a first point at one row, and beyond its last rows one at each
        doubling, as its last two points go on; empty where it was not measured."""
        points: list[tuple[float, float]] = []
        far: list[tuple[float, float]] = []
        highest = 0.0
        for rows, seconds in self.target:
            highest = max(highest, seconds)
            points.append((float(rows), highest))
        if not points:
            return []
        slopes = [(b - a) / (n - m) for (m, a), (n, b) in pairwise(points)] or [_TYPICAL_ROW * highest]
        (first, first_s), (last, last_s) = points[0], points[-1]
        one = [(1.0, max(0.1 * first_s, first_s - slopes[0] * (first - 1.0)))] if first > 1.0 else []
        while not far or far[-1][0] < _FARTHEST:
            beyond = 2.0 * (far[-1][0] if far else last)
            far.append((beyond, last_s + slopes[-1] * (beyond - last)))
        return [*one, *points, *far]

    def draft(self, proposer: int) -> tuple[float, float, float] | None:
        """Seconds of a proposer's draft to start, of a pass, and of a row in it; None where they were not measured."""
        curve = self.drafters[proposer] if proposer < len(self.drafters) else ()
        if not curve:
            return None
        (low, low_s), (high, high_s) = curve[0], curve[-1]
        row = max((high_s - low_s) / (high - low) if high > low else 0.0, 5e-4 * low_s)
        one = max(0.1 * low_s, low_s - row * low)
        first = self.first_s[proposer] if proposer < len(self.first_s) else 0.0
        return max(first, 0.01 * one), one, row
