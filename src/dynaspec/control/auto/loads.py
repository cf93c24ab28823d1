"""Whether steps have shown what drafting takes at the present number of requests."""

from __future__ import annotations

_OTHER = 1.5
"""What steps have shown holds up to so many times the requests, or as many times fewer."""
_ENOUGH = 16
"""Steps of drafting that show what it takes."""
_KNOWN_FOR = 2048
"""Steps for which that is good."""


class Loads:
    """Counts steps, by their number of requests.

    Costs learnt at two requests say little of four: rows beyond some number cost more, and more tokens share what a
    step takes around its passes.
    """

    def __init__(self) -> None:
        self._load = self._steps = self._missing = 0
        self._shown_at: dict[int, int] = {}
        """Step in which drafting last was known, by the bits of the number of requests."""

    @property
    def strange(self) -> bool:
        """Drafting has not been seen at this load, or long ago."""
        return self._missing > 0

    def meet(self, load: int, steps: int) -> bool:
        """So many steps have passed, and ``load`` requests are there now; returns whether that is another load."""
        self._steps += steps
        first, changed = not self._load, self._load > _OTHER * load or load > _OTHER * self._load
        if changed:
            shown_at = self._shown_at.get(load.bit_length(), -_KNOWN_FOR)
            self._missing = 0 if first or self._steps - shown_at < _KNOWN_FOR else _ENOUGH
            self._load = load
        return changed and not first

    def drafted(self, steps: int) -> None:
        """So many steps of drafting have passed at the present load."""
        self._missing = max(0, self._missing - steps)
        if not self._missing:
            self._shown_at[self._load.bit_length()] = self._steps
