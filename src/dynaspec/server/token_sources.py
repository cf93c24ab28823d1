"""Who wrote each token of a continuation: the drafter or the target."""

from __future__ import annotations

from dynaspec.contract.outputs import RequestMetrics

from .protocol.speculation import TokenSource


class TokenSources:
    """Follows one continuation through its deltas, whose metrics must be ``detailed``.

    A step with ``a`` accepted tokens has them from the drafter and one more from the target, unless the last accepted
    one has ended the request. A prompt's completion gives a token of the target's that belongs to no step; so does
    reading it again after a preemption. Where a delta holds such a token and steps besides, it is taken to come first.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._started = False

    def add(self, count: int, metrics: RequestMetrics) -> list[TokenSource]:
        """Sources of the next ``count`` tokens; ``metrics`` cover the continuation up to and with them."""
        new, self._steps = metrics.per_step[self._steps :], len(metrics.per_step)
        sources: list[TokenSource] = ["target"] if count and not self._started else []
        self._started |= count > 0
        for _, accepted in new:
            sources += ["draft"] * accepted
            sources.append("target")
        unknown: list[TokenSource] = ["target"] * (count - len(sources))
        return unknown + sources[:count]
