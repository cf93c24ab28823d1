"""How a stage goes, told while it runs."""

from __future__ import annotations

from typing import Protocol


class Report(Protocol):
    """One line of progress for people."""

    @property
    def share(self) -> float:
        """Part of the stage that is over, 0 … 1."""
        ...

    @property
    def figures(self) -> str:
        """What has been done and how long the rest will take, without a line break."""
        ...


class Listener(Protocol):
    """Hears how a stage goes."""

    def __call__(self, report: Report) -> None: ...


def time_left(seconds: float) -> str:
    """``seconds`` for people; infinite ones are not known."""
    return "? left" if seconds == float("inf") else f"{seconds / 60:.1f} min left"
