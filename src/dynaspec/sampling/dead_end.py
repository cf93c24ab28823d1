"""The end of a request whose rules leave no token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """No token may follow a request's output."""

    finish_reason: Literal["stop", "error"]
    """``stop`` if the output has the form asked for, though no token that ends it may follow."""
    why: str | None
    """A sentence, for errors."""
