"""Drafts as a controller sees them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dynaspec.contract.proposer import Drafts
from dynaspec.contract.step import DraftView


def draft_view(drafts: Drafts) -> DraftView:
    """What was drafted; requests whose proposer lacks a signal (None or NaN) have none in the view."""
    lens = tuple(drafts.lens.tolist())
    return DraftView(
        length=lens,
        confidence=((),) * len(lens) if drafts.confidence is None else _cut(drafts.confidence, lens),
        signal=() if drafts.signal is None else _cut(drafts.signal, lens),
        repeat_bonus=() if drafts.repeat_bonus is None else _cut(drafts.repeat_bonus, lens),
        parents=None if drafts.parents is None else _first(drafts.parents, lens),
    )


def _first(column: npt.NDArray[np.int64], lens: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(row[:n]) for row, n in zip(column.tolist(), lens, strict=True)])


def _cut(column: npt.NDArray[np.float32], lens: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    """Rows without their padding; empty ones for NaN."""
    rows = zip(column[:, : max(lens, default=0)].tolist(), lens, strict=True)
    return tuple([() if n == 0 or math.isnan(row[0]) else tuple(row[:n]) for row, n in rows])
