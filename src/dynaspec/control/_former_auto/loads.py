"""Whether steps have shown what drafting takes at the present number of requests."""

from __future__ import annotations

import math

_OTHER = 1.5
"""What steps have shown holds up to so many times the requests, or as many times fewer."""
_LASTS = 8
"""Steps that there are fewer requests before that counts as another load: for a step or two there are, between the end
of some and the start of those that follow."""
_ENOUGH = 16
"""Steps that show what drafting takes, those before it was sure that the load is another included."""
_KNOWN_FOR = 16384
"""Steps for which that is good."""


class Loads:
    """Counts steps, by their number of requests.

    Costs learnt at two requests say little of four: rows beyond some number cost more, and more tokens share what a
    step takes around its passes.
    """

    def __init__(self) -> None:
        self._load = self._steps = self._missing = 0
        self._fewer_since: int | None = None
        """Step since which there have been fewer requests."""
        self._shown_at: dict[int, int] = {}
        """Step in which drafting last was known, by kind of load."""

    @property
    def strange(self) -> bool:
        """Drafting has not been seen at this load, or long ago; or it is not sure yet which load this is."""
        return self._missing > 0 or self._fewer_since is not None

    @property
    def kind(self) -> int:
        """The same for about as many requests."""
        return self._load.bit_length()

    @property
    def unsure_for(self) -> float:
        """Steps after which it is known whether this is another load; infinite where nothing suggests it."""
        return math.inf if self._fewer_since is None else self._fewer_since + _LASTS - self._steps

    def meet(self, load: int, steps: int) -> bool:
        """So many steps have passed, and ``load`` requests are there now; returns whether that is another load."""
        self._steps += steps
        first, more, fewer = not self._load, load > _OTHER * self._load, self._load > _OTHER * load
        if not fewer:
            self._fewer_since = None
        elif self._fewer_since is None:
            self._fewer_since = self._steps
        changed = more or self.unsure_for <= 0
        if changed:
            self._load, self._fewer_since = load, None
            known = first or self._steps - self._shown_at.get(self.kind, -_KNOWN_FOR) < _KNOWN_FOR
            self._missing = 0 if known else _ENOUGH - fewer * _LASTS
        return changed and not first

    def drafted(self, steps: int) -> None:
        """So many steps of drafting have passed at the present load."""
        self._missing = max(0, self._missing - steps)
        if not self._missing:
            self._shown_at[self.kind] = self._steps
