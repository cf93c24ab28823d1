"""What ``auto`` holds on to between steps: lengths that were agreed on, and what was expected of planned steps."""

from __future__ import annotations

from dataclasses import dataclass

from dynaspec.contract.step import StopRule

from .drafter import Wish
from .guard import Mode, Prediction


@dataclass(slots=True)
class Pending:
    """A planned step, until its outcome comes."""

    prediction: Prediction
    alone: Prediction
    """The same without look-ups beside a model: what they add is told by how far steps surpass it."""
    mode: Mode
    found: bool
    """Look-ups draft beside the model, or beside plain decoding."""
    trims: bool
    match: tuple[tuple[int, ...] | None, ...]
    """For each proposer the match lengths [B] on offer; empty where none looks up."""


@dataclass(slots=True)
class Agreement:
    """Lengths and proposers for some steps of the same requests."""

    ids: tuple[str, ...]
    prefill: int
    lengths: Wish
    """As expected; what a rule ends is granted more."""
    wish: list[int]
    """[B]"""
    owner: tuple[int, ...] | None
    """[B] proposers; None: the first for all."""
    stop: StopRule | None
    hoped: float
    """Tokens/s; 0 without drafts."""
    plain_goodput: float
    """Tokens/s."""
    speculation: Prediction
    plain: Prediction
    trims: bool
    steps: int
    """For which it still holds."""
