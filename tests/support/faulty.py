"""Faults to inject: proposers that fail in every way the protocol leaves open, and models whose logits go bad."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

from dynaspec.contract.proposer import DecodeBatch, Drafts, Offers, TargetStep
from dynaspec.contract.step import SpecPlan

from .checkpoints import VOCAB
from .proposers import ScriptedProposer

Spoil = Callable[[Drafts, np.ndarray], Any]
"""(good drafts, rows [B] to spoil) → what is returned instead."""


class Injected(RuntimeError):
    """A fault that a test put in."""


class RaisingProposer(ScriptedProposer):
    """Raises in one of its methods, from the ``first`` call on, ``times`` times."""

    def __init__(self, texts: Sequence[Sequence[int]], method: str, *, first: int = 3, times: int = 1) -> None:
        super().__init__(texts, VOCAB, fixed_length=True)
        self.calls = 0
        self._method = method
        self._faulty = range(first, first + times)

    def _pass_through(self, method: str) -> None:
        if method == self._method:
            self.calls += 1
            if self.calls in self._faulty:
                raise Injected(f"{method}, call {self.calls}")

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        self._pass_through("lag")
        return super().lag(batch)

    def peek(self, batch: DecodeBatch) -> Offers | None:
        self._pass_through("peek")
        return super().peek(batch)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        self._pass_through("propose")
        return super().propose(batch, plan)

    def advance(self, step: TargetStep) -> None:
        self._pass_through("advance")

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        self._pass_through("admit")

    def evict(self, lane: int) -> None:
        self._pass_through("evict")


class SlowProposer(ScriptedProposer):
    """Takes ``seconds`` for each draft from the ``first`` on."""

    def __init__(self, texts: Sequence[Sequence[int]], seconds: float, *, first: int = 6) -> None:
        super().__init__(texts, VOCAB, fixed_length=True)
        self.calls = 0
        self._seconds = seconds
        self._first = first

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        self.calls += 1
        if self.calls >= self._first:
            time.sleep(self._seconds)
        return super().propose(batch, plan)


class SpoiltProposer(ScriptedProposer):
    """Returns nonsense for the oldest drafting request in its ``at``-th answer that has one, good drafts otherwise."""

    def __init__(self, texts: Sequence[Sequence[int]], spoil: Spoil, *, at: int = 3) -> None:
        super().__init__(texts, VOCAB, fixed_length=True)
        self._spoil = spoil
        self._left = at

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        drafts = super().propose(batch, plan)
        rows = np.flatnonzero(drafts.lens > 0)[:1]
        self._left -= int(rows.size)
        return self._spoil(drafts, rows) if self._left == 0 and rows.size else drafts


class SpoiltModel:
    """A model whose logits are not numbers from its ``first`` call on; in the ``rows`` given, or all."""

    def __init__(self, model: Any, *, first: int, rows: slice = slice(None)) -> None:
        self._model = model
        self._calls_left = first
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.logits(hidden)
        self._calls_left -= 1
        if self._calls_left <= 0:
            logits[self._rows] = torch.nan
        return logits


def spoilt_heads(honest: Callable[..., Any], *, first: int, rows: slice = slice(None)) -> Callable[..., Any]:
    """The method ``run`` of heads, with logits that are not numbers from its ``first`` call on, in the ``rows``."""
    calls = count(1)

    def run(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        state, logits = honest(*arguments)
        if next(calls) >= first:
            logits[rows] = torch.nan
        return state, logits

    return run
